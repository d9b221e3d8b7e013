"""MXFP4 to FP8 tiles or rows, from codes and scale bytes; reference: formats.cast_fp8.

One pass: the tile's codes stay in registers between the choice of its power of two and the
look-up of each code under its block's distance from it. Counts of what is lost are only computed
in tiles whose blocks lie too many octaves apart.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3quant.formats.blocks import check_packed
from k3quant.formats.e4m3 import encode_e4m3
from k3quant.formats.e8m0 import two_to
from k3quant.formats.mx import E2M1_VALUES, MX_BLOCK_SIZE
from k3quant.formats.tiles import BlockShape, grid_shape
from k3quant.kernels import bf16_pairs
from k3quant.kernels.nibble_table import look_up

_WARPS = 8
_REGISTERS = 48  # leaves room for five programs a multiprocessor
_ROWS_AT_ONCE = 8  # of one-row tiles


class Fp8Cast(NamedTuple):
    """A cast weight.

    Attributes:
        codes: `[..., rows, cols]` uint8 E4M3 bytes.
        scale: `[..., ceil(rows / R), ceil(cols / C)]` float32, powers of two.
        counts: `[3]` int32: blocks that lost values, values that became zero, NaN scale bytes
            (their number may be too low, but not zero when there are any).
    """

    codes: Tensor
    scale: Tensor
    counts: Tensor


def cast_mxfp4_to_fp8(packed: Tensor, scale_e8m0: Tensor, *, block_shape: BlockShape) -> Fp8Cast:
    """Write codes as E4M3 under one power of two a tile.

    Args:
        packed: `[..., rows, cols / 2]` uint8, low nibble first.
        scale_e8m0: `[..., rows, cols / 32]` uint8.
        block_shape: Rows and columns of a full tile; columns are a multiple of 32.

    Returns:
        The cast weight. An all-zero tile gets scale 1.0; zeros keep their sign.

    Raises:
        SchemaError: The scale grid does not fit the packed columns.
        ValueError: A tile would cut a block in two.
    """
    check_packed(packed, scale_e8m0, MX_BLOCK_SIZE)
    if block_shape[1] % MX_BLOCK_SIZE:
        raise ValueError(f"tile columns: expected a multiple of 32, got {block_shape[1]}")
    packed, scale_e8m0 = packed.contiguous(), scale_e8m0.contiguous()
    *lead, rows, half = packed.shape
    shape = (*lead, rows, half * 2)
    codes = torch.empty(shape, dtype=torch.uint8, device=packed.device)
    grid = grid_shape(shape, block_shape)
    scale = torch.empty(grid, dtype=torch.float32, device=packed.device)
    counts = torch.zeros(3, dtype=torch.int32, device=packed.device)
    if codes.numel():
        tile_rows, tile_blocks = block_shape[0], block_shape[1] // 32
        tiles = _ROWS_AT_ONCE if tile_rows == 1 else 1
        matrices = packed.numel() // (rows * half)
        launch = (grid[-1], triton.cdiv(grid[-2], tiles), matrices)
        _cast_mxfp4_to_fp8_kernel[launch](
            packed.view(torch.int32),
            scale_e8m0,
            _octave_table(packed.device),
            codes.view(torch.int32),
            scale,
            counts,
            rows,
            half // 16,
            grid[-2],
            TILES=tiles,
            TILE_ROWS=tile_rows,
            TILE_BLOCKS=tile_blocks,
            ROWS=triton.next_power_of_2(tile_rows),
            PAIRS=2 * triton.next_power_of_2(tile_blocks),
            num_warps=_WARPS,
            maxnreg=_REGISTERS if tiles == 1 else None,
        )
    return Fp8Cast(codes, scale, counts)


@cache
def _octave_table(device: torch.device) -> Tensor:
    """Return the bytes of codes 0..7 under -15 to 10 octaves, `[26, 2]` int32."""
    octaves = torch.arange(-15, 11)[:, None]
    table = encode_e4m3(torch.tensor(E2M1_VALUES[:8]) * two_to(octaves).float())
    return table.view(torch.int32).to(device)


@triton.jit
def _cast_mxfp4_to_fp8_kernel(
    words_ptr,
    scale_ptr,
    table_ptr,
    codes_ptr,
    tile_scale_ptr,
    counts_ptr,
    rows,
    row_blocks,
    tile_grid_rows,
    TILES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    ALL_ROWS: tl.constexpr = TILES * ROWS
    matrix = tl.program_id(2).to(tl.int64)
    r = tl.arange(0, ALL_ROWS)
    row = r // ROWS * TILE_ROWS + r % ROWS
    first_row = tl.program_id(1) * (TILES * TILE_ROWS)
    live_row = (r % ROWS < TILE_ROWS) & (row < rows - first_row)
    first_block = tl.program_id(0) * TILE_BLOCKS
    last_block = tl.minimum(row_blocks - first_block, TILE_BLOCKS)
    start = (matrix * rows + first_row) * row_blocks + first_block
    words_ptr += start * 4
    scale_ptr += start
    codes_ptr += start * 8
    row_start = (row * row_blocks)[:, None]

    # A thread holds two words of one block: they become the widest store there is, 16 bytes.
    w = tl.arange(0, PAIRS * 2)
    live = live_row[:, None] & (w // 4 < last_block)[None, :]
    place = tl.max_contiguous(row_start * 4 + w[None, :], [1, 2])
    words = tl.load(words_ptr + place, mask=live, other=0).to(tl.uint32, bitcast=True)
    words = tl.reshape(words, (ALL_ROWS, PAIRS, 2))
    # Loaded with pairs first, scales arrive at the threads that have the words.
    p = tl.arange(0, PAIRS)
    live = (p // 2 < last_block)[:, None] & live_row[None, :]
    place = (row * row_blocks)[None, :] + (p // 2)[:, None]
    scale = tl.load(scale_ptr + place, mask=live, other=0)
    tl.store(counts_ptr + 2 + tl.zeros((PAIRS, ALL_ROWS), tl.int32), 1, mask=scale == 255)
    scale = tl.trans(scale).to(tl.int32)

    # What bounds a block bounds one of its pairs, so pairs stand for blocks here.
    even, odd = tl.split(words)
    level = _level(even, odd)
    # Both bounds travel as the halves of a word, 0 for zeros, which bound nothing.
    bounds = ((scale + level + 1) << 16) | (256 - scale)
    bounds = tl.where(level < 0, 0, bounds).to(tl.uint32, bitcast=True)
    bounds = tl.reduce(tl.reshape(bounds, (TILES, ROWS * PAIRS)), 1, bf16_pairs.larger)
    wanted, deepest = (bounds >> 16).to(tl.int32), (bounds & 0xFFFF).to(tl.int32) - (256 - 127)
    # Level 3 is exact in E4M3 under at most 6 octaves, each level below under one more.
    tile = tl.where(wanted == 0, 0, tl.maximum(wanted - (127 + 10), -126))
    spread = tl.reshape(tl.broadcast_to(tile[:, None], (TILES, ROWS)), (ALL_ROWS,))
    octaves = scale - (127 + spread)[:, None]  # of no meaning for zeros, whose bytes stay zero
    is_deep = tl.max(deepest + tile, axis=0) > 5
    if is_deep:
        # One dimension, so that the layout of these loads stays in this branch.
        entry = tl.reshape(tl.minimum(tl.maximum(octaves, -15), 10) + 15, (ALL_ROWS * PAIRS,))
        low = tl.load(table_ptr + entry * 2).to(tl.uint32, bitcast=True)
        high = tl.load(table_ptr + entry * 2 + 1).to(tl.uint32, bitcast=True)
        low = tl.reshape(low, (ALL_ROWS, PAIRS))
        high = tl.reshape(high, (ALL_ROWS, PAIRS))
    else:
        # From -5 octaves on all bytes are normal: one more octave adds 8 to each but zero.
        steps = octaves.to(tl.uint32, bitcast=True)
        low, high = 0x3C383000 + steps * 0x08080800, 0x4C484440 + steps * 0x08080808
    first, second = look_up(words, low[:, :, None], high[:, :, None])

    codes = tl.reshape(tl.join(first, second), (ALL_ROWS, PAIRS * 4))
    w = tl.arange(0, PAIRS * 4)
    live = live_row[:, None] & (w // 8 < last_block)[None, :]
    place = tl.max_contiguous(row_start * 8 + w[None, :], [1, 4])
    tl.store(codes_ptr + place, codes.to(tl.int32, bitcast=True), mask=live)
    t = tl.program_id(1) * TILES + tl.arange(0, TILES)
    place = (matrix * tile_grid_rows + t) * tl.num_programs(0) + tl.program_id(0)
    power = ((tile + 127) << 23).to(tl.float32, bitcast=True)
    tl.store(tile_scale_ptr + place, power, mask=t < tile_grid_rows)

    if is_deep:
        lost = (octaves < _fewest_octaves(even, odd)) & (level >= 0)
        lost_blocks = tl.max(tl.reshape(lost.to(tl.int32), (ALL_ROWS, PAIRS // 2, 2)), axis=2)
        before = _ones((words | (words >> 1) | (words >> 2)) & 0x11111111)
        flushed = before - _ones(_is_nonzero(first)) - _ones(_is_nonzero(second))
        flushed = tl.sum(tl.sum(tl.sum(flushed, axis=2), axis=1), axis=0)
        tl.atomic_add(counts_ptr, tl.sum(tl.sum(lost_blocks, axis=1), axis=0))
        tl.atomic_add(counts_ptr + 1, flushed)


@triton.jit
def _level(even, odd):
    """Return the size of the largest code of two words: -1 zero, 0 a half, 1, 2, or 3 from 4 on."""
    any_bit = even | odd
    both = (even & (even << 1)) | (odd & (odd << 1))  # bit 2 where both exponent bits are set
    level = tl.where((any_bit & 0x22222222) != 0, 1, tl.where((any_bit & 0x11111111) != 0, 0, -1))
    level = tl.where((any_bit & 0x44444444) != 0, 2, level)
    return tl.where((both & 0x44444444) != 0, 3, level)


@triton.jit
def _fewest_octaves(even, odd):
    """Return the fewest octaves under which all codes of two words are in E4M3, -11..-8."""
    one_or_three, two_or_five, four_or_seven = _kinds(even)
    more = _kinds(odd)
    return tl.where(
        ((one_or_three | more[0]) & 0x11111111) != 0,
        -8,
        tl.where(
            ((two_or_five | more[1]) & 0x11111111) != 0,
            -9,
            tl.where(((four_or_seven | more[2]) & 0x11111111) != 0, -10, -11),
        ),
    )


@triton.jit
def _kinds(words):
    """Mark in bit 0 of each nibble codes 1 and 3, codes 2 and 5, codes 4 and 7."""
    bit0, bit1, bit2 = words, words >> 1, words >> 2
    two_or_five = (bit1 & ~bit0 & ~bit2) | (bit2 & ~bit1 & bit0)
    return bit0 & ~bit2, two_or_five, bit2 & ~(bit0 ^ bit1)


@triton.jit
def _ones(flags):
    """Count the set bits of words that only use the lowest bit of each nibble."""
    return ((flags * 0x11111111) >> 28).to(tl.int32)


@triton.jit
def _is_nonzero(codes):
    """Return bit 0 of each byte whose magnitude is not zero."""
    return (((codes & 0x7F7F7F7F) + 0x7F7F7F7F) >> 7) & 0x01010101
