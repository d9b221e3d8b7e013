"""Candidates for the kernels' block sizes and forms; what won is written in the kernels."""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise, product
from types import ModuleType

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

from k3quant.formats.mx import ScaleRounding
from k3quant.kernels import (
    attn_res_mix,
    kda_prefill,
    moe_tiles_mm,
    moe_w4a16,
    mxfp4_dequantize,
    mxfp4_quantize,
    mxfp4_to_fp8_block,
    mxfp4_to_mxfp8,
    mxfp4_to_nvfp4,
    situ_and_mul,
)
from k3quant.kernels.expert_tiles import cut_tiles, sort_slots

Candidates = Iterable[dict[str, int | None]]


def grid(**choices: tuple[int | None, ...]) -> Candidates:
    """Yield every combination of the choices."""
    for values in product(*choices.values()):
        yield dict(zip(choices, values, strict=True))


def attempt(
    measure: Callable[..., float],
    name: str,
    module: ModuleType,
    candidates: Candidates,
    work: Callable[[], object],
    amount: int,
) -> None:
    """Measure one kernel under each set of constants; what does not fit the device is noted."""
    for candidate in candidates:
        with constants(module, **candidate):
            try:
                measure(name, work, amount, **candidate)
            except Exception as error:
                print(f"FAILED {name} {candidate}: {error!r:.200}", flush=True)


def formats(meter: Meter, *, small: bool) -> None:
    """Try tile sizes of what must run at copy speed."""
    packed, scales = random_mxfp4(2 if small else 64, *SHAPES[0])
    weight, _ = mxfp4_dequantize.dequantize_mxfp4(packed, scales)
    elements, narrow = weight.numel(), packed.numel() + scales.numel()
    tiles = list(grid(_BLOCKS=(64, 128, 256), _WARPS=(2, 4, 8)))
    work = partial(mxfp4_dequantize.dequantize_mxfp4, packed, scales, out=weight)
    moved = narrow + 2 * elements
    attempt(meter.bandwidth, "dequantize", mxfp4_dequantize, tiles, work, moved)
    work = partial(mxfp4_quantize.quantize_mxfp4, weight, ScaleRounding.EVEN)
    attempt(meter.bandwidth, "quantize", mxfp4_quantize, tiles, work, moved)
    work = partial(mxfp4_to_nvfp4.rescale_mxfp4_to_nvfp4, packed, scales, exponent=-9)
    moved = narrow + packed.numel() + 2 * scales.numel()
    attempt(meter.bandwidth, "to_nvfp4", mxfp4_to_nvfp4, tiles, work, moved)
    work = partial(mxfp4_to_mxfp8.cast_mxfp4_to_mxfp8, packed, scales)
    moved = narrow + elements
    attempt(meter.bandwidth, "to_mxfp8", mxfp4_to_mxfp8, tiles, work, moved)


def fp8_block(meter: Meter, *, small: bool) -> None:
    """Try registers of the cast to FP8 tiles, and leave the best in the kernel."""
    packed, scales = random_mxfp4(2 if small else 64, *SHAPES[0])
    moved = 3 * packed.numel() + scales.numel()
    cast = mxfp4_to_fp8_block.cast_mxfp4_to_fp8
    work = partial(cast, packed, scales, block_shape=(128, 128))
    shares = {}
    for registers in (None, 56, 48, 40):
        mxfp4_to_fp8_block._REGISTERS = registers
        shares[registers] = meter.bandwidth("to_fp8_block", work, moved, registers=registers)
    best = max(shares, key=lambda registers: shares[registers])
    mxfp4_to_fp8_block._REGISTERS = best
    meter.result["tuned"]["to_fp8_block registers"] = best


def blocks(meter: Meter, *, small: bool) -> None:
    """Try tile sizes of SiTU and the attention residual."""
    tokens = 512 if small else 65536
    gate, up = random_bf16(2 * tokens, INNER), random_bf16(2 * tokens, INNER)
    tiles = grid(_ROWS=(2, 4, 8), _COLS=(256, 512, 1024), _WARPS=(4, 8))
    work = partial(situ_and_mul.situ_and_mul, gate, up, **BOUNDS)
    attempt(meter.bandwidth, "situ_and_mul", situ_and_mul, tiles, work, 6 * gate.numel())
    sources = [random_bf16(tokens // 2, 7168) for _ in range(9)]
    norm, proj = torch.rand(7168, device="cuda"), torch.randn((1, 7168), device="cuda")
    work = partial(attn_res_mix.attn_res_mix, sources, norm, proj, eps=1e-5)
    tiles = grid(_WARPS=(4, 8, 16), _STAGES=(1, 2, 3, 4, 5))
    moved = 20 * sources[0].numel()
    attempt(meter.bandwidth, "attn_res_mix", attn_res_mix, tiles, work, moved)


TILES = {
    32: [
        moe_w4a16.Tile(registers=96),
        moe_w4a16.Tile(depth=256, warps=8, registers=128),
        moe_w4a16.Tile(warps=8, registers=80),
        moe_w4a16.Tile(),
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
    cut = cut_tiles(order.offsets, rows)
    if name == "gate_up":
        x, weight = random_bf16(len(idx), LATENT), experts.w13
        table, settings, product = moe_w4a16.GATE_UP_TILES, BOUNDS, moe_w4a16.gate_up
    else:
        x, weight = random_bf16(idx.numel(), INNER), experts.w2
        table, settings, product = moe_w4a16.DOWN_TILES, {}, moe_w4a16.down
    pair = (weight.packed, weight.scale_e8m0)
    read = sum(part.numel() for part in pair)
    work = partial(product, x, pair, order, cut, rows=rows, **settings)
    shares = {}
    for tile in TILES[rows]:
        table[rows] = tile
        shares[tile] = meter.bandwidth(name, work, read, slots=rows, tile=str(tile))
    table[rows] = max(shares, key=lambda tile: shares[tile])
    meter.result["tuned"][f"{name} of {rows} slots"] = str(table[rows])
    print(f"   best {name} of {rows} slots: {table[rows]}", flush=True)


def decoded(meter: Meter, *, small: bool) -> None:
    """Compare products of decoded weights: own tiles, torch's grouped one, one an expert."""
    count = 16 if small else 56
    for rows in (32,) if small else (73, 146, 290, 585, 1170, 2340):
        idx, _ = random_routing(count * rows // 16, count)
        order = sort_slots(idx, count)
        cut = cut_tiles(order.offsets, moe_tiles_mm.TILE_ROWS)
        edges, flops = order.offsets.tolist(), moe_flops(idx)
        for name, width, depth in (("up", 2 * INNER, LATENT), ("down", LATENT, INNER)):
            x, weight = random_bf16(idx.numel(), depth), random_bf16(count, width, depth)
            part = flops * width * depth // (3 * INNER * LATENT)
            tiles = [
                {"_COLS": 256, "_DEPTH": 64, "_WARPS": 8, "_STAGES": 3},
                {"_COLS": 128, "_DEPTH": 64, "_WARPS": 4, "_STAGES": 3},
            ]
            work = partial(moe_tiles_mm.moe_tiles_mm, x, weight, cut, order.offsets)
            attempt(meter.compute, f"own {name} {rows}", moe_tiles_mm, tiles, work, part)
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
    "blocks": blocks,
    **{
        f"{name}{rows}": partial(fused, name=name, rows=rows)
        for name in ("gate_up", "down")
        for rows in TILES
    },
    "decoded": decoded,
    "attention": attention,
}
