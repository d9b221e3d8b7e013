"""Floats to FP8 tiles or rows under amax / 448; reference: formats.fp8_block.quantize_fp8_block."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3quant.formats.tiles import BlockShape, grid_shape
from k3quant.kernels.rounding import encode_e4m3_byte, to_float32

_COLS_AT_ONCE = 1024
_WARPS = 8


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
        _quantize_fp8_kernel[(scale.numel(),)](
            weight,
            codes,
            scale,
            fault,
            rows,
            cols,
            grid[-2],
            grid[-1],
            TILE_ROWS=block_shape[0],
            TILE_COLS=block_shape[1],
            ROWS=triton.next_power_of_2(block_shape[0]),
            COLS=min(_COLS_AT_ONCE, triton.next_power_of_2(block_shape[1])),
            num_warps=_WARPS,
        )
    return codes, scale, fault


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
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    r = tl.arange(0, ROWS)
    tile_row, tile_col = tl.program_id(0) // grid_cols, tl.program_id(0) % grid_cols
    matrix = (tile_row // grid_rows).to(tl.int64)
    row = tile_row % grid_rows * TILE_ROWS + r
    live_row = (r < TILE_ROWS) & (row < rows)
    first = tile_col * TILE_COLS
    last = tl.minimum(first + TILE_COLS, cols)
    place = (matrix * rows + row)[:, None] * cols
    largest = tl.zeros((ROWS, COLS), tl.int32)
    for start in range(first, last, COLS):
        col = start + tl.arange(0, COLS)
        live = live_row[:, None] & (col < last)[None, :]
        weight = to_float32(tl.load(weight_ptr + place + col[None, :], mask=live, other=0))
        largest = tl.maximum(largest, weight.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    bits = tl.max(tl.max(largest, axis=1), axis=0)
    amax = bits.to(tl.float32, bitcast=True)
    scale = tl.where(bits == 0, 1.0, tl.maximum(tl.div_rn(amax, 448.0), 2.0**-126))
    for start in range(first, last, COLS):
        col = start + tl.arange(0, COLS)
        live = live_row[:, None] & (col < last)[None, :]
        weight = to_float32(tl.load(weight_ptr + place + col[None, :], mask=live, other=0))
        codes = encode_e4m3_byte(tl.div_rn(weight, scale + tl.zeros((ROWS, COLS), tl.float32)))
        tl.store(codes_ptr + place + col[None, :], codes.to(tl.uint8), mask=live)
    tl.store(scale_ptr + tl.program_id(0), scale)
    tl.store(fault_ptr, 1, mask=bits >= 0x7F800000)
