"""INT4 groups to floats, integer * scale; reference: formats.int4.dequantize_int4."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3quant.formats.blocks import check_shape
from k3quant.kernels import bf16_pairs
from k3quant.kernels.int4_quantize import check_group_size
from k3quant.kernels.nvfp4_dequantize import TRITON_DTYPE
from k3quant.kernels.rounding import to_dtype, to_float32

_BYTES = 1024
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
        positive, or so large that a value may have overflowed.

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
    suspect = torch.zeros((), dtype=torch.int32, device=packed.device)
    if packed.numel():
        words = dtype == scale.dtype == torch.bfloat16
        groups = _BYTES * 2 // group_size
        _dequantize_int4_kernel[(triton.cdiv(scale.numel(), groups),)](
            packed.view(torch.uint8),
            scale,
            out.view(torch.int32) if words else out,
            suspect,
            scale.numel(),
            DTYPE=TRITON_DTYPE[dtype],
            WORDS=words,
            GROUP=group_size,
            GROUPS=groups,
            num_warps=_WARPS,
        )
    return out, suspect


@triton.jit
def _dequantize_int4_kernel(
    packed_ptr,
    scale_ptr,
    out_ptr,
    suspect_ptr,
    groups,
    DTYPE: tl.constexpr,
    WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):
    PAIRS: tl.constexpr = GROUP // 2
    start = tl.program_id(0).to(tl.int64) * GROUPS
    group = tl.arange(0, GROUPS)
    live = group < groups - start
    # Four bytes a thread become the widest store there is, 16 bytes.
    pair = tl.max_contiguous(group[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :], [1, 4])
    packed = tl.load(packed_ptr + start * PAIRS + pair, mask=live[:, None], other=0)
    stored = tl.load(scale_ptr + start + group, mask=live, other=1.0)
    scale = to_float32(stored)
    # A nibble in the last bits of the bfloat16 128 adds itself: 136 less is the integer.
    codes = ((packed.to(tl.uint32) * 0x1001) & 0x000F000F) | 0x43004300
    one, offset = tl.full((1, 1), 0x3F803F80, tl.uint32), tl.full((1, 1), 0xC308C308, tl.uint32)
    codes = bf16_pairs.multiply_add(codes, one, offset)
    if WORDS:
        # Products with a bfloat16 are rounded once, as those in float32 are.
        twice = stored.to(tl.uint16, bitcast=True).to(tl.uint32) * 0x10001
        values = bf16_pairs.multiply(codes, twice[:, None]).to(tl.int32, bitcast=True)
        tl.store(out_ptr + start * PAIRS + pair, values, mask=live[:, None])
    else:
        first = (codes << 16).to(tl.float32, bitcast=True) * scale[:, None]
        second = (codes & 0xFFFF0000).to(tl.float32, bitcast=True) * scale[:, None]
        values = to_dtype(tl.reshape(tl.join(first, second), (GROUPS, GROUP)), DTYPE)
        place = tl.max_contiguous(group[:, None] * GROUP + tl.arange(0, GROUP)[None, :], [1, 8])
        tl.store(out_ptr + start * GROUP + place, values, mask=live[:, None])
    largest = to_float32(to_dtype(scale * 8.0, DTYPE))
    bad = ~((scale > 0) & (largest < float("inf")))
    tl.store(suspect_ptr + tl.zeros((GROUPS,), tl.int32), 1, mask=live & bad)
