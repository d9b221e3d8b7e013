"""How fast the kernels are on one GPU, against a copy, peers and the arithmetic they must do.

Parts: `formats` (K3's expert matrices, 64 to 896 of them), `other` (the remaining conversions),
`peers` (the same beside other packages), `blocks` (the model's element-wise blocks), `moe` (one
full-size layer's routed experts from 1 k to 128 k tokens), `attention` (KDA whole and in segments,
its single step, MLA). Every share of copy is bytes read and written a second over those of a copy
in the same run.

Run: `python benchmarks/bench_kernels.py --out benchmarks/results/kernels-h200.json`. With
`--sweep`, candidates for block sizes and forms run first, and the parts named run under what won.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from harness import COPY_BYTES, Meter
from kernel_cases import (
    BOUNDS,
    INNER,
    LATENT,
    SHAPES,
    kda_inputs,
    moe_flops,
    moe_weight_bytes,
    random_bf16,
    random_experts,
    random_mxfp4,
    random_routing,
)
from kernel_peers import peer_cases
from kernel_sweeps import SWEEPS

from k3quant.formats.int4 import Int4Range
from k3quant.formats.mx import ScaleRounding
from k3quant.formats.nvfp4 import GlobalConvention, GlobalScale
from k3quant.kernels import kda_prefill
from k3quant.kernels.attn_res_mix import attn_res_mix
from k3quant.kernels.float_statistics import count_floats
from k3quant.kernels.fp8_dequantize import dequantize_fp8
from k3quant.kernels.fp8_quantize import quantize_fp8
from k3quant.kernels.int4_dequantize import dequantize_int4
from k3quant.kernels.int4_quantize import quantize_int4
from k3quant.kernels.int8_dequantize import dequantize_int8
from k3quant.kernels.int8_quantize import quantize_int8
from k3quant.kernels.kda_decode import kda_decode
from k3quant.kernels.mla_attention import mla_attend
from k3quant.kernels.moe_grouped_mm import moe_grouped_mm
from k3quant.kernels.mxfp4_dequantize import dequantize_mxfp4
from k3quant.kernels.mxfp4_quantize import quantize_mxfp4
from k3quant.kernels.mxfp4_statistics import count_mxfp4, count_scale_needs
from k3quant.kernels.mxfp4_to_fp8_block import cast_mxfp4_to_fp8
from k3quant.kernels.mxfp4_to_mxfp8 import cast_mxfp4_to_mxfp8
from k3quant.kernels.mxfp4_to_nvfp4 import rescale_mxfp4_to_nvfp4
from k3quant.kernels.mxfp8_dequantize import dequantize_mxfp8
from k3quant.kernels.mxfp8_quantize import quantize_mxfp8
from k3quant.kernels.nvfp4_dequantize import dequantize_nvfp4
from k3quant.kernels.nvfp4_quantize import quantize_nvfp4
from k3quant.kernels.rms_norm_gated import rms_norm_gated
from k3quant.kernels.router_topk import router_topk
from k3quant.kernels.short_conv import short_conv
from k3quant.kernels.situ_and_mul import situ_and_mul

TOKENS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
FUSED_UP_TO = 65536

Case = tuple[str, Callable[[], object], int]


def formats(meter: Meter, *, small: bool) -> None:
    """Measure what must run at copy speed, for growing numbers of experts."""
    for shape in SHAPES:
        for count in (2,) if small else (64, 256, 896):
            packed, scales = random_mxfp4(count, *shape)
            weight, _ = dequantize_mxfp4(packed, scales)
            elements, narrow = weight.numel(), packed.numel() + scales.numel()
            pair = (packed, scales)
            even, tile = ScaleRounding.EVEN, (128, 128)
            cases: list[Case] = [
                ("dequantize", partial(dequantize_mxfp4, *pair, out=weight), 2 * elements),
                ("quantize", partial(quantize_mxfp4, weight, even), 2 * elements),
                (
                    "to_nvfp4",
                    partial(rescale_mxfp4_to_nvfp4, *pair, exponent=-9),
                    packed.numel() + 2 * scales.numel(),
                ),
                ("to_fp8_block", partial(cast_mxfp4_to_fp8, *pair, block_shape=tile), elements),
                ("to_mxfp8", partial(cast_mxfp4_to_mxfp8, *pair), elements),
            ]
            for name, work, moved in cases:
                meter.bandwidth(name, work, narrow + moved, experts=count, shape=list(shape))
            meter.copy_bandwidth()


def other_formats(meter: Meter, *, small: bool) -> None:
    """Measure the remaining conversions and counts, 64 experts."""
    count, shape = 2 if small else 64, SHAPES[0]
    packed, scales = pair = random_mxfp4(count, *shape)
    narrow = packed.numel() + scales.numel()
    weight, _ = dequantize_mxfp4(packed, scales)
    wide, tile, row = 2 * weight.numel(), (128, 128), (1, shape[1])
    scale = GlobalScale(value=2.0**-12, convention=GlobalConvention.MULTIPLIER)
    to_int4 = partial(quantize_int4, group_size=32, grid=Int4Range.FULL, scale_dtype=torch.bfloat16)
    four, groups, _ = quantize_nvfp4(weight, scale)
    eight, tiles, _ = quantize_fp8(weight, block_shape=tile)
    by_row, row_scales, _ = quantize_fp8(weight, block_shape=row)
    words, steps, _ = to_int4(weight)
    mx_codes, mx_scales, _ = quantize_mxfp8(weight, ScaleRounding.RCEIL)
    bytes_, byte_scales, _ = quantize_int8(weight)
    halved = weight.numel() // 2 + weight.numel() // 16
    with_scales = 3 * wide // 2 + weight.numel() // 32
    as_half = partial(dequantize_mxfp4, dtype=torch.float16)
    as_float = partial(dequantize_mxfp4, dtype=torch.float32)
    far = partial(rescale_mxfp4_to_nvfp4, exponent=-19)
    cases: list[Case] = [
        ("dequantize_float16", partial(as_half, *pair), narrow + wide),
        ("dequantize_float32", partial(as_float, *pair), narrow + 2 * wide),
        ("to_fp8_channel", partial(cast_mxfp4_to_fp8, *pair, block_shape=row), narrow + wide // 2),
        ("to_nvfp4_moving_codes", partial(far, *pair), narrow + halved),
        ("count_mxfp4", partial(count_mxfp4, *pair), narrow),
        ("count_scale_needs", partial(count_scale_needs, *pair), narrow),
        ("count_floats", partial(count_floats, weight), wide),
        ("quantize_nvfp4", partial(quantize_nvfp4, weight, scale), wide + halved),
        ("dequantize_nvfp4", partial(dequantize_nvfp4, four, groups, scale), wide + halved),
        ("quantize_fp8_block", partial(quantize_fp8, weight, block_shape=tile), 3 * wide // 2),
        ("quantize_fp8_channel", partial(quantize_fp8, weight, block_shape=row), 3 * wide // 2),
        (
            "dequantize_fp8_block",
            partial(dequantize_fp8, eight, tiles, block_shape=tile),
            3 * wide // 2,
        ),
        (
            "dequantize_fp8_channel",
            partial(dequantize_fp8, by_row, row_scales, block_shape=row),
            3 * wide // 2,
        ),
        ("quantize_int4", partial(to_int4, weight), wide + halved),
        ("dequantize_int4", partial(dequantize_int4, words, steps, group_size=32), wide + halved),
        ("quantize_mxfp8", partial(quantize_mxfp8, weight, ScaleRounding.RCEIL), with_scales),
        ("dequantize_mxfp8", partial(dequantize_mxfp8, mx_codes, mx_scales), with_scales),
        ("quantize_int8_channel", partial(quantize_int8, weight), 3 * wide // 2),
        ("dequantize_int8_channel", partial(dequantize_int8, bytes_, byte_scales), 3 * wide // 2),
    ]
    for name, work, moved in cases:
        meter.bandwidth(name, work, moved, experts=count, shape=list(shape))


def blocks(meter: Meter, *, small: bool) -> None:
    """Measure the model's element-wise blocks."""
    tokens = 512 if small else 65536
    gate, up = random_bf16(4 * tokens, INNER), random_bf16(4 * tokens, INNER)
    meter.bandwidth("situ_and_mul", partial(situ_and_mul, gate, up, **BOUNDS), 6 * gate.numel())
    sources = [random_bf16(tokens, 7168) for _ in range(9)]
    norm, proj = torch.rand(7168, device="cuda"), torch.randn((1, 7168), device="cuda")
    for count in (2, 5, 9):
        work = partial(attn_res_mix, sources[:count], norm, proj, eps=1e-5)
        moved = 2 * (count + 1) * sources[0].numel()
        meter.bandwidth("attn_res_mix", work, moved, sources=count)
    x, z = random_bf16(24 * tokens, 128), random_bf16(24 * tokens, 128)
    work = partial(rms_norm_gated, x, random_bf16(128), z, eps=1e-5)
    meter.bandwidth("rms_norm_gated", work, 6 * x.numel())
    u, taps = random_bf16(1, tokens // 4, 96 * 128), random_bf16(96 * 128, 1, 4)
    meter.bandwidth("short_conv", partial(short_conv, u, taps, None), 4 * u.numel())
    logits, bias = torch.randn((tokens, 896), device="cuda"), torch.randn(896, device="cuda") / 10
    settings = {"k": 16, "sigmoid": True, "renormalize": True, "scaling": 2.5, "sum_eps": 1e-20}
    moved = 4 * logits.numel() + 12 * 16 * tokens
    meter.bandwidth("router_topk", partial(router_topk, logits, bias, **settings), moved)


def moe(meter: Meter, *, small: bool) -> None:
    """Measure one layer's routed experts in both forms."""
    experts = random_experts(16 if small else 896)
    weights = moe_weight_bytes(experts)
    for tokens in (64, 2048) if small else TOKENS:
        z = random_bf16(tokens, LATENT)
        routing = random_routing(tokens, experts.count)
        for fused in (True, False) if tokens <= FUSED_UP_TO else (False,):
            work = partial(moe_grouped_mm, z, *routing, experts, **BOUNDS, fused=fused)
            form = "fused" if fused else "decoded"
            meter.compute("moe", work, moe_flops(routing[0]), tokens=tokens, form=form)
            row = meter.result["rows"][-1]
            share = weights / meter.copy / (row["ms"] / 1e3)
            row["share_of_reading_weights_once"] = share
            print(f"   {share:.2f} of reading packed weights once", flush=True)


def attention(meter: Meter, *, small: bool) -> None:
    """Measure KDA whole and in segments, a single KDA step, and MLA."""
    length = 1024 if small else 65536
    inputs = kda_inputs(1, length)
    for scratch in (1 << 50, kda_prefill.SCRATCH_BYTES):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        settings = {"bounded": True, "scratch_bytes": scratch}
        work = partial(kda_prefill.kda_prefill, *inputs, None, **settings)
        meter.compute("kda_prefill", work, 0, tokens=length, scratch_budget=scratch)
        peak = torch.cuda.max_memory_allocated() - before
        meter.result["rows"][-1]["peak_bytes"] = peak
        print(f"   peak {peak / 1e9:.2f} GB", flush=True)
    q, k, v, log_decay, beta = kda_inputs(64, 1)
    state = torch.randn((64, 96, 128, 128), device="cuda")
    work = partial(kda_decode, q.float(), k.float(), v.float(), log_decay, beta, state)
    meter.bandwidth("kda_decode", work, 8 * state.numel(), windows=64)
    for tokens in (512,) if small else (8192, 32768):
        queried, latent = random_bf16(1, tokens, 1536), random_bf16(1, tokens, 512)
        q_weight, kv_weight = random_bf16(96 * 192, 1536) / 40, random_bf16(96 * 256, 512) / 23
        rope = random_bf16(1, tokens, 64)
        widths = {"heads": 96, "nope": 128, "v_dim": 128}
        work = partial(mla_attend, queried, q_weight, latent, kv_weight, rope, **widths)
        flops = 96 * tokens * (tokens * (192 + 128) + 2 * 192 * 1536 + 2 * 256 * 512)
        meter.compute("mla_attend", work, flops, tokens=tokens)


PARTS = {
    "formats": formats,
    "other": other_formats,
    "peers": peer_cases,
    "blocks": blocks,
    "moe": moe,
    "attention": attention,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", action="append", choices=[*PARTS])
    parser.add_argument("--sweep", action="append", choices=[*SWEEPS], help="runs first")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--small", action="store_true", help="tiny sizes, to compile everything")
    options = parser.parse_args()
    peers = ("fla-core", "compressed-tensors", "torchao")
    copied = COPY_BYTES >> 8 if options.small else COPY_BYTES
    meter = Meter(options.out, runs=options.runs, copy_bytes=copied, packages=peers)
    meter.copy_bandwidth()
    print(f"copy {meter.copy / 1e9:.0f} GB/s", flush=True)
    torch.manual_seed(0)
    for name in options.sweep or ():
        meter.guarded(name, partial(SWEEPS[name], meter, small=options.small))
        meter.copy_bandwidth()
    meter.result["sweeps"], meter.result["rows"] = meter.result["rows"], []
    for name in options.part or (() if options.sweep else PARTS):
        meter.guarded(name, partial(PARTS[name], meter, small=options.small))
        meter.copy_bandwidth()
    meter.save()
    print(f"copy {meter.copy / 1e9:.0f} GB/s over the whole run", flush=True)


if __name__ == "__main__":
    main()
