"""INT8 rows to floats, integer * scale; reference: formats.int8_channel.dequantize_int8_channel."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3quant.formats.blocks import check_shape
from k3quant.kernels.nvfp4_dequantize import TRITON_DTYPE
from k3quant.kernels.rounding import join_four, to_dtype, to_float32

_COLS = 4096
_WARPS = 4


def dequantize_int8(
    codes: Tensor, scale: Tensor, *, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    """Compute integer * scale in float32.

    Args:
        codes: `[..., rows, cols]` int8.
        scale: `[..., rows, 1]` float32 or bfloat16.
        dtype: float32, bfloat16 or float16.

    Returns:
        `[..., rows, cols]` in `dtype`, and an int32 scalar that is 1 when a scale is not finite
        and positive, or so large that a value may have overflowed.

    Raises:
        SchemaError: The scales are not one a row.
    """
    check_shape("scales", scale, (*codes.shape[:-1], 1))
    codes, scale = codes.contiguous(), scale.contiguous()
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    suspect = torch.zeros((), dtype=torch.int32, device=codes.device)
    if codes.numel():
        cols = codes.shape[-1]
        words = cols % 4 == 0
        width = min(_COLS, max(16, triton.next_power_of_2(cols)))
        _dequantize_int8_kernel[(scale.numel(), triton.cdiv(cols, width))](
            codes.view(torch.int32) if words else codes,
            scale,
            out,
            suspect,
            cols,
            cols // 4,
            WORDS=words,
            DTYPE=TRITON_DTYPE[dtype],
            COLS=width,
            num_warps=_WARPS,
        )
    return out, suspect


@triton.jit
def _integer(words, AT: tl.constexpr):
    """Return a byte of words, read as an integer from -128 to 127, as float32."""
    BIAS: tl.constexpr = 2.0**23 + 128.0
    return (((words >> AT) & 0xFF) | 0x4B000000).to(tl.float32, bitcast=True) - BIAS


@triton.jit
def _dequantize_int8_kernel(
    codes_ptr,
    scale_ptr,
    out_ptr,
    suspect_ptr,
    cols,
    row_words,
    WORDS: tl.constexpr,
    DTYPE: tl.constexpr,
    COLS: tl.constexpr,
):
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLS
    scale = to_float32(tl.load(scale_ptr + row))
    col = tl.max_contiguous(first + tl.arange(0, COLS)[None, :], [1, 8])
    if WORDS:
        # Two words a thread become the widest store there is, 16 bytes.
        word = tl.max_contiguous(first // 4 + tl.arange(0, COLS // 4)[None, :], [1, 2])
        words = tl.load(codes_ptr + row * row_words + word, mask=word < row_words, other=0)
        words = words.to(tl.uint32, bitcast=True) ^ 0x80808080
        values = join_four(
            _integer(words, 0) * scale,
            _integer(words, 8) * scale,
            _integer(words, 16) * scale,
            _integer(words, 24) * scale,
            1,
            COLS,
        )
    else:
        codes = tl.load(codes_ptr + row * cols + col, mask=col < cols, other=0)
        values = codes.to(tl.float32) * scale
    tl.store(out_ptr + row * cols + col, to_dtype(values, DTYPE), mask=col < cols)
    largest = to_float32(to_dtype(scale * 128.0, DTYPE))
    tl.store(suspect_ptr, 1, mask=~((scale > 0) & (largest < float("inf"))))
