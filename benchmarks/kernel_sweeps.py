"""Candidates for the kernels' block sizes and forms; what won is written in the kernels."""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise, product
from types import ModuleType
from typing import Any

import torch
from harness import Meter, constants
from kernel_cases import (
    BOUNDS,
    INNER,
    LATENT,
    SHAPES,
    kda_inputs,
    moe_flops,
    random_bf16,
    random_experts,
    random_mxfp4,
    random_routing,
)
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from k3quant.formats.int4 import Int4Range
from k3quant.formats.mx import ScaleRounding
from k3quant.formats.nvfp4 import GlobalConvention, GlobalScale
from k3quant.kernels import (
    attn_res_mix,
    fp8_dequantize,
    fp8_quantize,
    int4_dequantize,
    int4_quantize,
    int8_dequantize,
    int8_quantize,
    kda_prefill,
    moe_tiles_mm,
    moe_w4a16,
    mxfp4_dequantize,
    mxfp4_quantize,
    mxfp4_to_fp8_block,
    mxfp4_to_mxfp8,
    mxfp4_to_nvfp4,
    mxfp8_dequantize,
    mxfp8_quantize,
    nvfp4_quantize,
    router_topk,
    situ_and_mul,
)
from k3quant.kernels.expert_tiles import cut_tiles, sort_slots

Candidates = Iterable[dict[str, Any]]
Case = tuple[str, Callable[[], object], int]


def grid(**choices: tuple[int, ...]) -> Candidates:
    """Yield every combination of the choices."""
    for values in product(*choices.values()):
        yield dict(zip(choices, values, strict=True))


def attempt(meter: Meter, module: ModuleType, candidates: Candidates, *cases: Case) -> None:
    """Measure a kernel under each set of constants, and leave the best in its module.

    The best is the one whose slowest case is fastest; what does not fit the device is noted.
    """
    best, best_share = None, 0.0
    for candidate in candidates:
        with constants(module, **candidate):
            try:
                shares = [meter.bandwidth(*case, tuning=str(candidate)) for case in cases]
            except Exception as error:
                print(f"FAILED {cases[0][0]} {candidate}: {error!r:.200}", flush=True)
                continue
        if min(shares) > best_share:
            best, best_share = candidate, min(shares)
    for name, value in (best or {}).items():
        setattr(module, name, value)
    meter.result["tuned"][cases[0][0]] = str(best)
    print(f"   best {cases[0][0]}: {best}, {best_share:.3f} of copy", flush=True)


def formats(meter: Meter, *, small: bool) -> None:
    """Try tile sizes of what must run at copy speed."""
    packed, scales = random_mxfp4(2 if small else 64, *SHAPES[0])
    weight, _ = mxfp4_dequantize.dequantize_mxfp4(packed, scales)
    elements, narrow = weight.numel(), packed.numel() + scales.numel()
    tiles = list(grid(_BLOCKS=(64, 128, 256), _WARPS=(2, 4, 8)))
    moved = narrow + 2 * elements
    work = partial(mxfp4_dequantize.dequantize_mxfp4, packed, scales, out=weight)
    attempt(meter, mxfp4_dequantize, tiles, ("dequantize", work, moved))
    work = partial(mxfp4_quantize.quantize_mxfp4, weight, ScaleRounding.EVEN)
    attempt(meter, mxfp4_quantize, tiles, ("quantize", work, moved))
    work = partial(mxfp4_to_nvfp4.rescale_mxfp4_to_nvfp4, packed, scales, exponent=-9)
    moved = narrow + packed.numel() + 2 * scales.numel()
    attempt(meter, mxfp4_to_nvfp4, tiles, ("to_nvfp4", work, moved))
    work = partial(mxfp4_to_mxfp8.cast_mxfp4_to_mxfp8, packed, scales)
    attempt(meter, mxfp4_to_mxfp8, tiles, ("to_mxfp8", work, narrow + elements))


def fp8_block(meter: Meter, *, small: bool) -> None:
    """Try warps and registers of the cast to FP8 tiles, both shapes."""
    choices = ((8, None), (8, 56), (8, 48), (8, 40), (4, None), (4, 80), (16, 32))
    cases: list[Case] = []
    for shape in SHAPES:
        packed, scales = random_mxfp4(2 if small else 64, *shape)
        cast = mxfp4_to_fp8_block.cast_mxfp4_to_fp8
        work = partial(cast, packed, scales, block_shape=(128, 128))
        cases.append(("to_fp8_block", work, 3 * packed.numel() + scales.numel()))
    tiles = [{"_WARPS": warps, "_REGISTERS": registers} for warps, registers in choices]
    attempt(meter, mxfp4_to_fp8_block, tiles, *cases)


def dense_quantize(meter: Meter, *, small: bool) -> None:
    """Try tile sizes of what quantizes dense weights."""
    weight = random_bf16(2 if small else 64, *SHAPES[0]) / 40
    n, shape = weight.numel(), SHAPES[0]
    scale = GlobalScale(value=2.0**-12, convention=GlobalConvention.MULTIPLIER)
    work = partial(nvfp4_quantize.quantize_nvfp4, weight, scale)
    tiles = [{"_GROUPS": g, "_WARPS": w} for g, w in ((128, 4), (256, 4), (512, 4), (256, 8))]
    attempt(meter, nvfp4_quantize, tiles, ("quantize_nvfp4", work, 41 * n // 16))
    settings = {"group_size": 32, "grid": Int4Range.FULL, "scale_dtype": torch.bfloat16}
    work = partial(int4_quantize.quantize_int4, weight, **settings)
    tiles = grid(_ELEMENTS=(2048, 4096, 8192), _WARPS=(4, 8))
    attempt(meter, int4_quantize, tiles, ("quantize_int4", work, 41 * n // 16))
    threads = [{"_PAIRS_A_THREAD": pairs} for pairs in (8, 16, 32)]
    by_tile = partial(fp8_quantize.quantize_fp8, weight, block_shape=(128, 128))
    by_row = partial(fp8_quantize.quantize_fp8, weight, block_shape=(1, shape[1]))
    cases: list[Case] = [
        ("quantize_fp8 tiles", by_tile, 3 * n),
        ("quantize_fp8 rows", by_row, 3 * n),
    ]
    attempt(meter, fp8_quantize, threads, *cases)
    work = partial(int8_quantize.quantize_int8, weight)
    attempt(meter, int8_quantize, threads, ("quantize_int8", work, 3 * n))
    work = partial(mxfp8_quantize.quantize_mxfp8, weight, ScaleRounding.RCEIL)
    tiles = grid(_BLOCKS=(64, 128, 256), _WARPS=(4, 8))
    attempt(meter, mxfp8_quantize, tiles, ("quantize_mxfp8", work, 97 * n // 32))


def dense_dequantize(meter: Meter, *, small: bool) -> None:
    """Try tile sizes of what dequantizes dense weights, and warps of the router."""
    weight = random_bf16(2 if small else 64, *SHAPES[0]) / 40
    n, shape = weight.numel(), SHAPES[0]
    codes, scales, _ = mxfp8_quantize.quantize_mxfp8(weight, ScaleRounding.RCEIL)
    work = partial(mxfp8_dequantize.dequantize_mxfp8, codes, scales)
    tiles = grid(_BLOCKS=(64, 128, 256))
    attempt(meter, mxfp8_dequantize, tiles, ("dequantize_mxfp8", work, 97 * n // 32))
    codes, scales, _ = int8_quantize.quantize_int8(weight)
    work = partial(int8_dequantize.dequantize_int8, codes, scales)
    tiles = grid(_COLS=(1024, 2048, 4096))
    attempt(meter, int8_dequantize, tiles, ("dequantize_int8", work, 3 * n))
    settings = {"group_size": 32, "grid": Int4Range.FULL, "scale_dtype": torch.bfloat16}
    codes, scales, _ = int4_quantize.quantize_int4(weight, **settings)
    work = partial(int4_dequantize.dequantize_int4, codes, scales, group_size=32)
    tiles = grid(_BYTES=(1024, 2048, 4096))
    attempt(meter, int4_dequantize, tiles, ("dequantize_int4", work, 41 * n // 16))
    cases: list[Case] = []
    for name, block in (("tiles", (128, 128)), ("rows", (1, shape[1]))):
        codes, scales, _ = fp8_quantize.quantize_fp8(weight, block_shape=block)
        work = partial(fp8_dequantize.dequantize_fp8, codes, scales, block_shape=block)
        cases.append((f"dequantize_fp8 {name}", work, 3 * n))
    attempt(meter, fp8_dequantize, grid(_COLS=(2048, 4096), _WARPS=(4, 8, 16)), *cases)
    tokens = 512 if small else 65536
    logits, bias = torch.randn((tokens, 896), device="cuda"), torch.randn(896, device="cuda") / 10
    chosen = {"k": 16, "sigmoid": True, "renormalize": True, "scaling": 2.5, "sum_eps": 1e-20}
    work = partial(router_topk.router_topk, logits, bias, **chosen)
    attempt(meter, router_topk, grid(_WARPS=(1, 2, 4)), ("router_topk", work, 4 * logits.numel()))


def situ(meter: Meter, *, small: bool) -> None:
    """Try tile sizes of SiTU."""
    tokens = 512 if small else 65536
    gate, up = random_bf16(2 * tokens, INNER), random_bf16(2 * tokens, INNER)
    tiles = grid(_ROWS=(1, 2, 4), _COLS=(512, 1024), _WARPS=(1, 2, 4))
    work = partial(situ_and_mul.situ_and_mul, gate, up, **BOUNDS)
    attempt(meter, situ_and_mul, tiles, ("situ_and_mul", work, 6 * gate.numel()))


def residual(meter: Meter, *, small: bool) -> None:
    """Try tokens and warps a program and sources in flight of the attention residual."""
    tokens = 512 if small else 65536
    sources = [random_bf16(tokens, 7168) for _ in range(9)]
    norm, proj = torch.rand(7168, device="cuda"), torch.randn((1, 7168), device="cuda")

    def case(count: int) -> Case:
        work = partial(attn_res_mix.attn_res_mix, sources[:count], norm, proj, eps=1e-5)
        return f"attn_res_mix of {count}", work, 2 * (count + 1) * sources[0].numel()

    shapes = [
        {"_TOKENS": tokens, "_WARPS": warps, "_STAGES": stages}
        for tokens, warps, stages in product((4, 16, 64), (4, 8), (3, 4))
    ]
    attempt(meter, attn_res_mix, shapes, case(2), case(5), case(9))


TILES = {
    32: [
        moe_w4a16.Tile(registers=96),
        moe_w4a16.Tile(depth=256, warps=8, registers=128),
        moe_w4a16.Tile(),
        moe_w4a16.Tile(stages=4),
        moe_w4a16.Tile(rows=256, warps=8),
        moe_w4a16.Tile(rows=256, warps=8, registers=128),
        moe_w4a16.Tile(rows=256),
        moe_w4a16.Tile(rows=256, warps=8, stages=4, registers=128),
        moe_w4a16.Tile(rows=256, depth=256, warps=8),
        moe_w4a16.Tile(rows=256, depth=256, warps=8, stages=2),
    ],
    64: [
        moe_w4a16.Tile(),
        moe_w4a16.Tile(registers=168),
        moe_w4a16.Tile(warps=8, registers=80),
    ],
    128: [moe_w4a16.Tile(), moe_w4a16.Tile(stages=2), moe_w4a16.Tile(warps=8, stages=2)],
}


def fused(meter: Meter, *, small: bool, rows: int, name: str) -> None:
    """Try tiles of a product that decodes inside, and leave the best in the kernels' table."""
    experts = random_experts(16 if small else 896)
    idx, _ = random_routing(64 if small else 32 * rows, experts.count)
    order = sort_slots(idx, experts.count)
    cut = cut_tiles(order.offsets, idx.numel(), rows)
    if name == "gate_up":
        x, weight = random_bf16(len(idx), LATENT), experts.w13
        table, settings, multiply = moe_w4a16.GATE_UP_TILES, BOUNDS, moe_w4a16.gate_up
    else:
        x, weight = random_bf16(idx.numel(), INNER), experts.w2
        table, settings, multiply = moe_w4a16.DOWN_TILES, {}, moe_w4a16.down
    pair = (weight.packed, weight.scale_e8m0)
    read = sum(part.numel() for part in pair)
    work = partial(multiply, x, pair, order, cut, rows=rows, **settings)
    shares, before = {}, table[rows]
    for tile in TILES[rows]:
        table[rows] = tile
        try:
            shares[tile] = meter.bandwidth(name, work, read, slots=rows, tile=str(tile))
        except Exception as error:
            print(f"FAILED {name} {tile}: {error!r:.200}", flush=True)
    table[rows] = max(shares, key=lambda tile: shares[tile], default=before)
    meter.result["tuned"][f"{name} of {rows} slots"] = str(table[rows])
    print(f"   best {name} of {rows} slots: {table[rows]}", flush=True)


def decoded(meter: Meter, *, small: bool) -> None:
    """Compare products of decoded weights: own tiles, torch's grouped one, one an expert."""
    count = 16 if small else 56
    for rows in (32,) if small else (73, 146, 290, 585, 1170, 2340):
        idx, _ = random_routing(count * rows // 16, count)
        order = sort_slots(idx, count)
        cut = cut_tiles(order.offsets, idx.numel(), moe_tiles_mm.TILE_ROWS)
        edges, flops = order.offsets.tolist(), moe_flops(idx)
        for name, width, depth in (("up", 2 * INNER, LATENT), ("down", LATENT, INNER)):
            x, weight = random_bf16(idx.numel(), depth), random_bf16(count, width, depth)
            part = flops * width * depth // (3 * INNER * LATENT)
            tiles = [
                {"_COLS": 256, "_DEPTH": 64, "_WARPS": 8, "_STAGES": 3},
                {"_COLS": 128, "_DEPTH": 64, "_WARPS": 4, "_STAGES": 3},
            ]
            work = partial(moe_tiles_mm.moe_tiles_mm, x, weight, cut, order.offsets)
            for tile in tiles:
                with constants(moe_tiles_mm, **tile):
                    meter.compute(f"own {name} {rows}", work, part, tile=str(tile))
            out = x.new_empty((len(x), width))
            meter.compute(f"mm {name} {rows}", partial(_one_by_one, x, weight, out, edges), part)
            work = partial(torch._grouped_mm, x, weight.mT, order.offsets[1:])
            meter.compute(f"grouped_mm {name} {rows}", work, part)


def _one_by_one(x: Tensor, weight: Tensor, out: Tensor, edges: list[int]) -> None:
    for expert, (first, last) in enumerate(pairwise(edges)):
        torch.mm(x[first:last], weight[expert].T, out=out[first:last])


def attention(meter: Meter, *, small: bool) -> None:
    """Try segment lengths of KDA and torch's kernels for MLA's widths."""
    length = 2048 if small else 65536
    inputs = kda_inputs(1, length)
    for tokens in (8192, 16384, 32768, 65536):
        budget = tokens * 96 * 128 * kda_prefill._SCRATCH_PER_CHANNEL
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work = partial(kda_prefill.kda_prefill, *inputs, None, bounded=True, scratch_bytes=budget)
        meter.compute("kda_prefill", work, 0, segment=tokens)
        peak = torch.cuda.max_memory_allocated() - before
        print(f"   peak {peak / 1e9:.2f} GB", flush=True)
    tokens = 512 if small else 16384
    q, k, v = (random_bf16(1, 24, tokens, 192) for _ in range(3))
    flops = 2 * 24 * tokens * tokens * 160
    for backend, width in (
        (SDPBackend.FLASH_ATTENTION, 192),
        (SDPBackend.CUDNN_ATTENTION, 192),
        (SDPBackend.CUDNN_ATTENTION, 128),
        (SDPBackend.EFFICIENT_ATTENTION, 128),
    ):
        work = partial(scaled_dot_product_attention, q, k, v[..., :width], is_causal=True)
        with sdpa_kernel(backend):
            meter.compute("sdpa", work, flops, backend=backend.name, width=width)


SWEEPS: dict[str, Callable[..., None]] = {
    "formats": formats,
    "fp8_block": fp8_block,
    "dense_quantize": dense_quantize,
    "dense_dequantize": dense_dequantize,
    "situ": situ,
    "residual": residual,
    **{
        f"{name}{rows}": partial(fused, name=name, rows=rows)
        for name in ("gate_up", "down")
        for rows in TILES
    },
    "decoded": decoded,
    "attention": attention,
}
