"""Floats to FP8 tiles or rows under amax / 448; reference: formats.fp8_block.quantize_fp8_block."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3quant.formats.tiles import BlockShape, grid_shape
from k3quant.kernels.float_pairs import are_words, larger, largest_of_rows, load_pairs
from k3quant.kernels.rounding import divide, encode_e4m3_pair, split_divisor

_PAIRS_AT_ONCE = 8192
_PAIRS_A_THREAD = 32


def quantize_fp8(weight: Tensor, *, block_shape: BlockShape) -> tuple[Tensor, Tensor, Tensor]:
    """Round values to E4M3 under amax / 448 of their tile.

    Args:
        weight: `[..., rows, cols]` float32, bfloat16 or float16, any size.
        block_shape: Rows and columns of a full tile.

    Returns:
        `[..., rows, cols]` uint8 E4M3 bytes; `[..., ceil(rows / R), ceil(cols / C)]` float32
        scales, 1.0 for an all-zero tile; and an int32 scalar that is 1 when a value is NaN or
        infinite, and the rest is then undefined.
    """
    weight = weight.contiguous()
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    grid = grid_shape(tuple(weight.shape), block_shape)
    scale = torch.empty(grid, dtype=torch.float32, device=weight.device)
    fault = torch.zeros((), dtype=torch.int32, device=weight.device)
    if weight.numel():
        rows, cols = weight.shape[-2:]
        tile_cols = min(block_shape[1], cols)
        words = are_words(weight) and tile_cols % 2 == 0
        tile_rows = triton.next_power_of_2(block_shape[0])
        pairs = triton.next_power_of_2(triton.cdiv(tile_cols, 2))
        pairs = min(pairs, max(1, _PAIRS_AT_ONCE // tile_rows))
        _quantize_fp8_kernel[(scale.numel(),)](
            weight.view(torch.int32) if words else weight,
            codes.view(torch.int16) if words else codes,
            scale,
            fault,
            rows,
            cols // 2 if words else cols,
            grid[-2],
            grid[-1],
            TILE_ROWS=block_shape[0],
            TILE_COLS=tile_cols,
            WORDS=words,
            SHORT=weight.dtype != torch.float32,
            ROWS=tile_rows,
            PAIRS=pairs,
            num_warps=max(4, min(16, tile_rows * pairs // (32 * _PAIRS_A_THREAD))),
        )
    return codes, scale, fault


@triton.jit
def _load_part(
    weight_ptr,
    part,
    cols,
    live_row,
    left,
    TILE_COLS: tl.constexpr,
    WORDS: tl.constexpr,
    ROWS,
    PAIRS,
):
    """Load some columns of a tile; return also where they are and which are live."""
    row, pair = tl.arange(0, ROWS)[:, None], part + tl.arange(0, PAIRS)[None, :]
    if WORDS:
        place = row * cols + pair
        live = live_row[:, None] & (pair < TILE_COLS // 2) & (pair < left)
        second_live = live
    else:
        place = row * cols + 2 * pair
        live = live_row[:, None] & (2 * pair < TILE_COLS) & (2 * pair < left)
        second_live = live_row[:, None] & (2 * pair + 1 < TILE_COLS) & (2 * pair + 1 < left)
    loaded = load_pairs(weight_ptr, place, live, second_live, WORDS)
    return loaded[0], loaded[1], loaded[3], place, live, second_live


@triton.jit
def _store_part(codes_ptr, first, second, divisor, place, live, second_live, WORDS, SHORT):
    mantissa, lift, inverse = divisor
    first = divide(first, mantissa, lift, inverse, SHORT)
    second = divide(second, mantissa, lift, inverse, SHORT)
    codes = encode_e4m3_pair(first, second)
    if WORDS:
        tl.store(codes_ptr + place, codes.to(tl.int16, bitcast=True), mask=live)
    else:
        tl.store(codes_ptr + place, (codes & 0xFF).to(tl.uint8), mask=live)
        tl.store(codes_ptr + place + 1, (codes >> 8).to(tl.uint8), mask=second_live)


@triton.jit
def _quantize_fp8_kernel(
    weight_ptr,
    codes_ptr,
    scale_ptr,
    fault_ptr,
    rows,
    cols,
    grid_rows,
    grid_cols,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
    WORDS: tl.constexpr,
    SHORT: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    # Columns are counted in words where there are words.
    WIDTH: tl.constexpr = TILE_COLS // 2 if WORDS else TILE_COLS
    FITS: tl.constexpr = 2 * PAIRS >= TILE_COLS
    tile_row, tile_col = tl.program_id(0) // grid_cols, tl.program_id(0) % grid_cols
    matrix, first_row = (tile_row // grid_rows).to(tl.int64), tile_row % grid_rows * TILE_ROWS
    start = (matrix * rows + first_row) * cols + tile_col * WIDTH
    weight_ptr += start
    codes_ptr += start
    left = cols - tile_col * WIDTH
    r = tl.arange(0, ROWS)
    live_row = (r < TILE_ROWS) & (r < rows - first_row)
    if FITS:
        # The tile stays in registers between the choice of its scale and the division.
        first, second, magnitude, place, live, second_live = _load_part(
            weight_ptr, 0, cols, live_row, left, TILE_COLS, WORDS, ROWS, PAIRS
        )
        bits = tl.max(largest_of_rows(magnitude, WORDS), axis=0)
    else:
        largest = tl.zeros((ROWS, PAIRS), tl.uint32)
        for part in range(0, (TILE_COLS + 1) // 2, PAIRS):
            loaded = _load_part(
                weight_ptr, part, cols, live_row, left, TILE_COLS, WORDS, ROWS, PAIRS
            )
            largest = larger(largest, loaded[2], WORDS)
        bits = tl.max(largest_of_rows(largest, WORDS), axis=0)
    amax = bits.to(tl.float32, bitcast=True)
    scale = tl.where(bits == 0, 1.0, tl.maximum(tl.div_rn(amax, 448.0), 2.0**-126))
    divisor = split_divisor(scale)
    if FITS:
        _store_part(codes_ptr, first, second, divisor, place, live, second_live, WORDS, SHORT)
    else:
        for part in range(0, (TILE_COLS + 1) // 2, PAIRS):
            first, second, _, place, live, second_live = _load_part(
                weight_ptr, part, cols, live_row, left, TILE_COLS, WORDS, ROWS, PAIRS
            )
            _store_part(codes_ptr, first, second, divisor, place, live, second_live, WORDS, SHORT)
    tl.store(scale_ptr + tl.program_id(0), scale)
    tl.store(fault_ptr, 1, mask=bits >= 0x7F800000)
