"""FP8 tiles or rows to floats, E4M3 * scale; reference: formats.fp8_block.dequantize_fp8_block."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3quant.formats.blocks import check_shape
from k3quant.formats.tiles import BlockShape, grid_shape
from k3quant.kernels.nvfp4_dequantize import TRITON_DTYPE
from k3quant.kernels.rounding import (
    decode_e4m3_byte,
    decode_e4m3_word,
    is_nan_e4m3,
    join_four,
    to_dtype,
    to_float32,
)

_ELEMENTS = 16384
_COLS = 4096
_WARPS = 16

# Of tiles whose columns are no whole words.
_ODD_ROWS = 16
_ODD_COLS = 256


def dequantize_fp8(
    codes: Tensor,
    scale: Tensor,
    *,
    block_shape: BlockShape,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """Compute E4M3 * scale in float32.

    Args:
        codes: `[..., rows, cols]` uint8 E4M3 bytes.
        scale: `[..., ceil(rows / R), ceil(cols / C)]` float32 or bfloat16.
        block_shape: Rows and columns of a full tile.
        dtype: float32, bfloat16 or float16.

    Returns:
        `[..., rows, cols]` in `dtype`, and an int32 scalar that is 1 when a byte is NaN, a scale
        is not finite and positive, or so large that a value may have overflowed.

    Raises:
        SchemaError: The scale grid does not fit.
    """
    check_shape("scale grid", scale, grid_shape(tuple(codes.shape), block_shape))
    codes, scale = codes.contiguous(), scale.contiguous()
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    suspect = torch.zeros((), dtype=torch.int32, device=codes.device)
    if codes.numel():
        rows, cols = codes.shape[-2:]
        tile_cols = min(block_shape[1], cols)
        tile_rows = triton.next_power_of_2(min(block_shape[0], rows))
        width = min(_COLS, max(16, triton.next_power_of_2(tile_cols)))
        if cols % 4 == 0 and tile_cols % 4 == 0 and tile_rows * width <= _ELEMENTS:
            _dequantize_words_kernel[(scale.numel(), triton.cdiv(tile_cols, width))](
                codes.view(torch.int32),
                scale,
                out,
                suspect,
                rows,
                cols // 4,
                scale.shape[-2],
                scale.shape[-1],
                TILE_ROWS=block_shape[0],
                TILE_WORDS=tile_cols // 4,
                DTYPE=TRITON_DTYPE[dtype],
                ROWS=tile_rows,
                COLS=width,
                num_warps=_WARPS if tile_rows * width > _COLS else 4,
            )
        else:
            matrices = codes.numel() // (rows * cols)
            grid = (triton.cdiv(cols, _ODD_COLS), triton.cdiv(rows, _ODD_ROWS), matrices)
            _dequantize_bytes_kernel[grid](
                codes,
                scale,
                out,
                suspect,
                rows,
                cols,
                scale.shape[-2],
                scale.shape[-1],
                TILE_ROWS=block_shape[0],
                TILE_COLS=block_shape[1],
                DTYPE=TRITON_DTYPE[dtype],
                ROWS=_ODD_ROWS,
                COLS=_ODD_COLS,
                num_warps=4,
            )
    return out, suspect


@triton.jit
def _is_suspect(scale, DTYPE: tl.constexpr):
    """Mark scales that are none, or under which 448 overflows."""
    return ~((scale > 0) & (to_float32(to_dtype(scale * 448.0, DTYPE)) < float("inf")))


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _dequantize_words_kernel(
    words_ptr,
    scale_ptr,
    out_ptr,
    suspect_ptr,
    rows,
    row_words,
    grid_rows,
    grid_cols,
    TILE_ROWS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    tile_row, tile_col = tl.program_id(0) // grid_cols, tl.program_id(0) % grid_cols
    matrix, first_row = (tile_row // grid_rows).to(tl.int64), tile_row % grid_rows * TILE_ROWS
    first_word = tl.program_id(1) * (COLS // 4)
    in_row = tile_col * TILE_WORDS + first_word
    start = (matrix * rows + first_row) * row_words + in_row
    scale = to_float32(tl.load(scale_ptr + tl.program_id(0)))
    r = tl.arange(0, ROWS)[:, None]
    live_row = (r < TILE_ROWS) & (r < rows - first_row)
    w = tl.arange(0, COLS // 4)[None, :]
    live = live_row & (w < TILE_WORDS - first_word) & (w < row_words - in_row)
    # Two words a thread become the widest store there is, 16 bytes.
    place = tl.max_contiguous(r * row_words + w, [1, 2])
    words = tl.load(words_ptr + start + place, mask=live, other=0)
    words = words.to(tl.uint32, bitcast=True)
    a, b, c, d = decode_e4m3_word(words)
    values = join_four(a * scale, b * scale, c * scale, d * scale, ROWS, COLS)
    col = tl.arange(0, COLS)[None, :]
    live = live_row & (col < 4 * (TILE_WORDS - first_word)) & (col < 4 * (row_words - in_row))
    place = tl.max_contiguous(r * (row_words * 4) + col, [1, 8])
    tl.store(out_ptr + start * 4 + place, to_dtype(values, DTYPE), mask=live)
    # The marks of a thread's own words need no other thread.
    nan = tl.reduce(tl.reshape(is_nan_e4m3(words), (ROWS, COLS // 8, 2)), 2, _either)
    tl.store(suspect_ptr + tl.zeros((ROWS, COLS // 8), tl.int32), 1, mask=nan > 0)
    tl.store(suspect_ptr, 1, mask=_is_suspect(scale, DTYPE))


@triton.jit
def _dequantize_bytes_kernel(
    codes_ptr,
    scale_ptr,
    out_ptr,
    suspect_ptr,
    rows,
    cols,
    grid_rows,
    grid_cols,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    matrix = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    live = (row < rows)[:, None] & (col < cols)[None, :]
    place = (matrix * rows + row)[:, None] * cols + col[None, :]
    codes = tl.load(codes_ptr + place, mask=live, other=0).to(tl.uint32)
    tile = (matrix * grid_rows + row // TILE_ROWS)[:, None] * grid_cols + (col // TILE_COLS)[
        None, :
    ]
    scale = to_float32(tl.load(scale_ptr + tile, mask=live, other=1.0))
    tl.store(out_ptr + place, to_dtype(decode_e4m3_byte(codes) * scale, DTYPE), mask=live)
    bad = ((codes & 0x7F) == 0x7F) | _is_suspect(scale, DTYPE)
    tl.store(suspect_ptr + tl.zeros((ROWS, COLS), tl.int32), 1, mask=live & bad)
