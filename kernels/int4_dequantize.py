"""INT4 groups to floats, integer * scale; reference: formats.int4.dequantize_int4."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3quant.formats.blocks import check_shape
from k3quant.kernels.int4_quantize import check_group_size
from k3quant.kernels.nvfp4_dequantize import TRITON_DTYPE
from k3quant.kernels.rounding import to_dtype, to_float32

_WORDS = 512
_WARPS = 4


def dequantize_int4(
    packed: Tensor, scale: Tensor, *, group_size: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    """Compute integer * scale in float32.

    Args:
        packed: `[..., cols / 8]` int32 words.
        scale: `[..., cols / group_size]` floating.
        group_size: Elements under one scale, a power of two from 8 to 1024.
        dtype: float32, bfloat16 or float16.

    Returns:
        `[..., cols]` in `dtype`, and an int32 scalar that is 1 when a scale is not finite and
        positive or a value overflows.

    Raises:
        SchemaError: The scales do not fit the words.
        UsageError: `group_size` is not supported.
    """
    check_group_size(group_size)
    groups = packed.shape[-1] * 8 // group_size
    check_shape("scale grid", scale, (*packed.shape[:-1], groups))
    packed, scale = packed.contiguous(), scale.contiguous()
    shape = (*packed.shape[:-1], packed.shape[-1] * 8)
    out = torch.empty(shape, dtype=dtype, device=packed.device)
    fault = torch.zeros((), dtype=torch.int32, device=packed.device)
    if packed.numel():
        _dequantize_int4_kernel[(triton.cdiv(packed.numel(), _WORDS),)](
            packed,
            scale,
            out,
            fault,
            packed.numel(),
            DTYPE=TRITON_DTYPE[dtype],
            GROUP_WORDS=group_size // 8,
            WORDS=_WORDS,
            num_warps=_WARPS,
        )
    return out, fault


@triton.jit
def _dequantize_int4_kernel(
    packed_ptr,
    scale_ptr,
    out_ptr,
    fault_ptr,
    words,
    DTYPE: tl.constexpr,
    GROUP_WORDS: tl.constexpr,
    WORDS: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * WORDS
    word = tl.max_contiguous(tl.arange(0, WORDS), 1)
    live = word < words - start
    packed = tl.load(packed_ptr + start + word, mask=live, other=0)
    scale = tl.load(scale_ptr + (start + word) // GROUP_WORDS, mask=live, other=1.0)
    scale = to_float32(scale)
    code = ((packed[:, None] >> (tl.arange(0, 8) * 4)[None, :]) & 15) - 8
    values = to_dtype(code.to(tl.float32) * scale[:, None], DTYPE)
    offsets = word[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(out_ptr + start * 8 + offsets, values, mask=live[:, None])
    bad = ~((scale > 0) & (scale < float("inf")))[:, None]
    bad = bad | (tl.abs(to_float32(values)) == float("inf"))
    tl.store(fault_ptr + tl.zeros((WORDS, 8), tl.int32), 1, mask=live[:, None] & bad)
