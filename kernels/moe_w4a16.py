"""Routed experts straight from MXFP4, for few tokens an expert; reference: models.moe.

Weights are decoded in registers and meet the tokens in tensor cores, so they cross memory once.
A word of eight codes yields pairs of codes i and i + 4 by shifts and masks alone. Inputs lie in
memory in the order in which those pairs reach the tensor core, see `interleave`.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3quant.kernels import bf16_pairs
from k3quant.kernels.expert_tiles import ExpertTiles, SortedSlots
from k3quant.kernels.rounding import dot_bf16, to_bf16, to_float32
from k3quant.kernels.situ_and_mul import situ

MAX_SCALE = 128
"""The largest scale byte these kernels can decode: code * 2. Real weights stay far below."""

DEPTH = 128
"""The columns of both products are multiples of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How a program of either product is cut.

    Attributes:
        rows: Rows of the weight.
        depth: Columns a step, 128 where the weight's are no multiple of it.
        warps: Warps of a program.
        stages: Steps in flight and at hand.
        registers: Most registers a thread may have; fewer let more programs share a processor.
    """

    rows: int = 128
    depth: int = 128
    warps: int = 4
    stages: int = 3
    registers: int | None = None


# By slots of a tile; 32 to 128 measured on one H200.
GATE_UP_TILES = {
    16: Tile(),
    32: Tile(rows=256, depth=256, warps=8),
    64: Tile(warps=8, registers=80),
    128: Tile(),
}
DOWN_TILES = {
    16: Tile(depth=256, warps=8, registers=128),
    32: Tile(depth=256),
    64: Tile(),
    128: Tile(),
}


def slots_of_tile(usual: float) -> int:
    """Return how many slots a tile should have, so that few weights are read twice.

    Args:
        usual: Mean slots an expert.
    """
    return next((slots for slots in (16, 32, 64) if 1.5 * usual <= slots), 128)


def interleave_columns(z: Tensor) -> Tensor:
    """Copy rows, their columns in the order of `interleave`.

    Args:
        z: `[N, D]` bfloat16, contiguous, D a multiple of 32.

    Returns:
        `[N, D]` bfloat16.
    """
    out = torch.empty_like(z)
    if z.numel():
        grid = (len(z), triton.cdiv(z.shape[1], 1024))
        _interleave_kernel[grid](z, out, z.shape[1], COLS=1024, num_warps=4)
    return out


def gate_up(
    x: Tensor,
    w13: tuple[Tensor, Tensor],
    slots: SortedSlots,
    tiles: ExpertTiles,
    *,
    rows: int,
    beta: float,
    linear_beta: float,
) -> Tensor:
    """Compute SiTU of both projections of each slot.

    Args:
        x: `[N, D]` bfloat16 tokens from `interleave_columns`.
        w13: Packed codes `[E, 2 I, D / 2]`, gates first, and scale bytes `[E, 2 I, D / 32]`, none
            above `MAX_SCALE`.
        slots: The sorted slots.
        tiles: Tiles of `rows` slots.
        rows: 16, 32, 64 or 128.
        beta: Bound of SiTU's gate side.
        linear_beta: Bound of its linear side.

    Returns:
        `[slots, I]` bfloat16, columns interleaved.
    """
    inner, depth = w13[0].shape[1] // 2, x.shape[-1]
    out = torch.empty((len(slots.slot), inner), dtype=torch.bfloat16, device=x.device)
    if out.numel():
        tile = GATE_UP_TILES[rows]
        _gate_up_kernel[(triton.cdiv(inner, tile.rows // 2) * len(tiles.expert),)](
            x,
            slots.slot,
            w13[0].view(torch.int32),
            w13[1].view(torch.int32),
            out,
            tiles.expert,
            tiles.first,
            slots.offsets,
            SLOTS_A_TOKEN=slots.place.shape[1],
            INNER=inner,
            DEPTH_ALL=depth,
            BETA=beta,
            LINEAR_BETA=linear_beta,
            ROWS=tile.rows,
            SLOTS=rows,
            DEPTH=DEPTH if depth % tile.depth else tile.depth,
            num_warps=tile.warps,
            num_stages=tile.stages,
            maxnreg=tile.registers,
        )
    return out


def down(
    x: Tensor, w2: tuple[Tensor, Tensor], slots: SortedSlots, tiles: ExpertTiles, *, rows: int
) -> Tensor:
    """Project each slot down.

    Args:
        x: `[slots, I]` bfloat16 from `gate_up`.
        w2: Packed codes `[E, D, I / 2]` and scale bytes `[E, D, I / 32]`, none above `MAX_SCALE`.
        slots: The sorted slots.
        tiles: Tiles of `rows` slots.
        rows: 16, 32, 64 or 128.

    Returns:
        `[slots, D]` bfloat16.
    """
    width, inner = w2[0].shape[1], x.shape[-1]
    out = torch.empty((len(x), width), dtype=torch.bfloat16, device=x.device)
    if out.numel():
        tile = DOWN_TILES[rows]
        _down_kernel[(triton.cdiv(width, tile.rows) * len(tiles.expert),)](
            x,
            w2[0].view(torch.int32),
            w2[1].view(torch.int32),
            out,
            tiles.expert,
            tiles.first,
            slots.offsets,
            WIDTH=width,
            INNER=inner,
            ROWS=tile.rows,
            SLOTS=rows,
            DEPTH=DEPTH if inner % tile.depth else tile.depth,
            num_warps=tile.warps,
            num_stages=tile.stages,
            maxnreg=tile.registers,
        )
    return out


@triton.jit
def interleave(column):
    """Return which column of its 32 stands at a place.

    Lane j of a quad feeds the tensor core, in each of two steps, the columns 2j, 2j + 1, 2j + 8 and
    2j + 9; these shall be codes of word j, in pairs of i and i + 4.
    """
    place = column % 32
    word, step, half = (place >> 1) & 3, place >> 4, (place >> 3) & 1
    return column - place + 8 * word + 2 * step + half + 4 * (place & 1)


@triton.jit
def _interleave_kernel(z_ptr, out_ptr, width, COLS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    x = tl.load(z_ptr + row + interleave(column), mask=column < width, other=0)
    tl.store(out_ptr + row + column, x, mask=column < width)


@triton.jit
def _halves(word):
    """Split words into their two bfloat16, a new last dimension."""
    low = (word & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    high = (word >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _decode_tile(words, scales, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """Decode `[ROWS, DEPTH / 8]` words under `[ROWS, DEPTH / 128]` words of four scale bytes."""
    exponents = tl.join(
        tl.join(scales & 0xFF, (scales >> 16) & 0xFF),
        tl.join((scales >> 8) & 0xFF, scales >> 24),
    )
    # 2^(scale - 1): what a code's bits are short of its value, times its scale.
    scale = ((tl.reshape(exponents, (ROWS, DEPTH // 32)) + 126) * 0x00800080)[:, :, None]
    words = tl.reshape(words, (ROWS, DEPTH // 32, 4))
    upper = words >> 8
    pairs = tl.join(
        tl.join(_low_pair(words, scale), _low_pair(upper, scale)),
        tl.join(_high_pair(words, scale), _high_pair(upper, scale)),
    )
    values = _halves(pairs)  # [ROWS, block, word, step, half, of pair]
    return tl.reshape(tl.permute(values, (0, 1, 3, 4, 2, 5)), (ROWS, DEPTH))


@triton.jit
def _low_pair(words, scale):
    """Decode nibbles 0 and 4: one product moves magnitude and sign to their places."""
    placed = ((words & 0x000F000F) * 0x1040) & 0x81C081C0
    return bf16_pairs.multiply(placed, scale)


@triton.jit
def _high_pair(words, scale):
    """Decode nibbles 1 and 5."""
    placed = ((words & 0x00F000F0) * 0x104) & 0x81C081C0
    return bf16_pairs.multiply(placed, scale)


@triton.jit
def _tile(tile, expert_ptr, first_ptr, offsets_ptr, SLOTS: tl.constexpr):
    """Return the expert, first slot and end of slots of a tile."""
    expert = tl.load(expert_ptr + tile)
    start = tl.load(offsets_ptr + expert) + (tile - tl.load(first_ptr + expert)) * SLOTS
    return expert.to(tl.int64), start, tl.load(offsets_ptr + expert + 1)


@triton.jit
def _product(
    x_ptr,
    x_rows,
    live,
    words_ptr,
    scales_ptr,
    w_rows,
    DEPTH_ALL: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Multiply rows of a packed weight with slots, `[ROWS, SLOTS]` float32.

    Only scalars move in the loop: offsets of rows are added to them, which is cheaper than moving
    every pointer.
    """
    x_place = x_rows[None, :] * DEPTH_ALL + tl.arange(0, DEPTH)[:, None]
    w_place = w_rows[:, None] * (DEPTH_ALL // 8) + tl.arange(0, DEPTH // 8)[None, :]
    s_place = w_rows[:, None] * (DEPTH_ALL // 128) + tl.arange(0, DEPTH // 128)[None, :]
    total = tl.zeros((ROWS, SLOTS), tl.float32)
    for _ in range(0, DEPTH_ALL, DEPTH):
        x = tl.load(x_ptr + x_place, mask=live[None, :], other=0)
        words = tl.load(words_ptr + w_place).to(tl.uint32, bitcast=True)
        scales = tl.load(scales_ptr + s_place).to(tl.uint32, bitcast=True)
        total = dot_bf16(_decode_tile(words, scales, ROWS, DEPTH), x, total)
        x_ptr += DEPTH
        words_ptr += DEPTH // 8
        scales_ptr += DEPTH // 128
    return total


@triton.jit
def _gate_up_kernel(
    x_ptr,
    slot_ptr,
    words_ptr,
    scales_ptr,
    out_ptr,
    expert_ptr,
    first_ptr,
    offsets_ptr,
    SLOTS_A_TOKEN: tl.constexpr,
    INNER: tl.constexpr,
    DEPTH_ALL: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    # Half the rows are gates, half ups of the same outputs. The next product wants its columns
    # interleaved: these rows are they.
    HALF: tl.constexpr = ROWS // 2
    tile = tl.program_id(0) // tl.cdiv(INNER, HALF)
    expert, start, end = _tile(tile, expert_ptr, first_ptr, offsets_ptr, SLOTS)
    r = tl.arange(0, ROWS)
    first = tl.program_id(0) % tl.cdiv(INNER, HALF) * HALF
    row = tl.minimum(interleave(first + r % HALF), INNER - 1) + r // HALF * INNER
    slot = start + tl.arange(0, SLOTS)
    live = slot < end
    token = tl.load(slot_ptr + slot, mask=live, other=0) // SLOTS_A_TOKEN
    words_ptr += expert * (2 * INNER * (DEPTH_ALL // 8))
    scales_ptr += expert * (2 * INNER * (DEPTH_ALL // 128))
    both = _product(x_ptr, token, live, words_ptr, scales_ptr, row, DEPTH_ALL, ROWS, SLOTS, DEPTH)
    both = to_float32(to_bf16(both))
    gate, up = tl.split(tl.permute(tl.reshape(both, (2, HALF, SLOTS)), (1, 2, 0)))
    value = to_bf16(situ(gate, up, BETA, LINEAR_BETA))
    place = first + tl.arange(0, HALF)
    out_place = slot.to(tl.int64)[None, :] * INNER + place[:, None]
    tl.store(out_ptr + out_place, value, mask=live[None, :] & (place < INNER)[:, None])


@triton.jit
def _down_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    out_ptr,
    expert_ptr,
    first_ptr,
    offsets_ptr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    tile = tl.program_id(0) // tl.cdiv(WIDTH, ROWS)
    expert, start, end = _tile(tile, expert_ptr, first_ptr, offsets_ptr, SLOTS)
    place = tl.program_id(0) % tl.cdiv(WIDTH, ROWS) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, SLOTS)
    live = i < end - start
    x_ptr += start.to(tl.int64) * INNER
    words_ptr += expert * (WIDTH * (INNER // 8))
    scales_ptr += expert * (WIDTH * (INNER // 128))
    row = tl.minimum(place, WIDTH - 1)
    total = _product(x_ptr, i, live, words_ptr, scales_ptr, row, INNER, ROWS, SLOTS, DEPTH)
    out_place = (start + i).to(tl.int64)[None, :] * WIDTH + place[:, None]
    tl.store(out_ptr + out_place, to_bf16(total), mask=live[None, :] & (place < WIDTH)[:, None])
