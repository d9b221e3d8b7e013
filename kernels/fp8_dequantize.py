"""FP8 tiles or rows to floats, E4M3 * scale; reference: formats.fp8_block.dequantize_fp8_block."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3quant.formats.blocks import check_shape
from k3quant.formats.tiles import BlockShape, grid_shape
from k3quant.kernels.nvfp4_dequantize import TRITON_DTYPE
from k3quant.kernels.rounding import decode_e4m3_byte, to_dtype, to_float32

_ROWS = 16
_COLS = 256
_WARPS = 4


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
        is not finite and positive, or a value overflows.

    Raises:
        SchemaError: The scale grid does not fit.
    """
    check_shape("scale grid", scale, grid_shape(tuple(codes.shape), block_shape))
    codes, scale = codes.contiguous(), scale.contiguous()
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    fault = torch.zeros((), dtype=torch.int32, device=codes.device)
    if codes.numel():
        rows, cols = codes.shape[-2:]
        matrices = codes.numel() // (rows * cols)
        grid = (triton.cdiv(cols, _COLS), triton.cdiv(rows, _ROWS), matrices)
        _dequantize_fp8_kernel[grid](
            codes,
            scale,
            out,
            fault,
            rows,
            cols,
            scale.shape[-2],
            scale.shape[-1],
            TILE_ROWS=block_shape[0],
            TILE_COLS=block_shape[1],
            DTYPE=TRITON_DTYPE[dtype],
            ROWS=_ROWS,
            COLS=_COLS,
            num_warps=_WARPS,
        )
    return out, fault


@triton.jit
def _dequantize_fp8_kernel(
    codes_ptr,
    scale_ptr,
    out_ptr,
    fault_ptr,
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
    values = to_dtype(decode_e4m3_byte(codes) * scale, DTYPE)
    tl.store(out_ptr + place, values, mask=live)
    bad = ((codes & 0x7F) == 0x7F) | ~((scale > 0) & (scale < float("inf")))
    bad |= tl.abs(to_float32(values)) == float("inf")
    tl.store(fault_ptr + tl.zeros((ROWS, COLS), tl.int32), 1, mask=live & bad)
