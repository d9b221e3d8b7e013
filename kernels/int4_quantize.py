"""Floats to INT4 groups, eight integers to a word; reference: formats.int4.quantize_int4."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3quant.errors import SchemaError, UsageError
from k3quant.formats.int4 import Int4Range
from k3quant.kernels.nvfp4_dequantize import TRITON_DTYPE
from k3quant.kernels.rounding import to_dtype, to_float32

_ELEMENTS = 4096
_WARPS = 4
_GROUP_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)


def check_group_size(group_size: int) -> None:
    """Refuse group sizes that words and tiles do not fit.

    Raises:
        UsageError: The size is no power of two from 8 to 1024.
    """
    if group_size not in _GROUP_SIZES:
        raise UsageError(
            f"group size: expected a power of two from 8 to 1024 on a GPU, got {group_size}",
            hint="use `--device cpu`, which takes any group size",
        )


def quantize_int4(
    weight: Tensor, *, group_size: int, grid: Int4Range, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Round values to INT4, ties to even.

    Args:
        weight: `[..., cols]` float32, bfloat16 or float16.
        group_size: Elements under one scale, a power of two from 8 to 1024.
        grid: Which integers to use.
        scale_dtype: Dtype of the stored scale, to which it is rounded before it is used.

    Returns:
        `[..., cols / 8]` int32 words; `[..., cols / group_size]` scales, 1.0 for an all-zero
        group; and an int32 scalar that is 1 when a value is NaN or infinite, and the rest is then
        undefined.

    Raises:
        SchemaError: The columns are no multiple of `group_size`.
        UsageError: `group_size` is not supported.
    """
    check_group_size(group_size)
    *lead, cols = weight.shape
    if cols % group_size:
        raise SchemaError(f"columns: expected a multiple of {group_size}, got {cols}")
    weight = weight.contiguous()
    packed = torch.empty((*lead, cols // 8), dtype=torch.int32, device=weight.device)
    scale = torch.empty((*lead, cols // group_size), dtype=scale_dtype, device=weight.device)
    fault = torch.zeros((), dtype=torch.int32, device=weight.device)
    groups = _ELEMENTS // group_size
    if scale.numel():
        _quantize_int4_kernel[(triton.cdiv(scale.numel(), groups),)](
            weight,
            packed,
            scale,
            fault,
            scale.numel(),
            DIVISOR=grid.divisor,
            SMALLEST=grid.smallest,
            SEARCHES=grid is Int4Range.BALANCED and scale_dtype.itemsize == 2,
            TINY=torch.finfo(scale_dtype).tiny,
            SCALE_DTYPE=TRITON_DTYPE[scale_dtype],
            GROUP=group_size,
            GROUPS=groups,
            num_warps=_WARPS,
        )
    return packed, scale, fault


@triton.jit
def _steps(weight, scale, SMALLEST: tl.constexpr):
    """Return the nearest integers, ties to even, int32."""
    ROUND: tl.constexpr = 1.5 * 2.0**23  # adding it leaves no bit after the point
    step = to_float32(scale)[:, None] + tl.zeros(weight.shape, tl.float32)
    ratio = tl.minimum(tl.maximum(tl.div_rn(weight, step), -16.0), 16.0)
    whole = ((ratio + ROUND) - ROUND).to(tl.int32)
    return tl.minimum(tl.maximum(whole, SMALLEST), 7)


@triton.jit
def _squared_error(weight, scale, SMALLEST: tl.constexpr, DTYPE: tl.constexpr):
    """Return what a scale costs each group, float64."""
    steps = _steps(weight, scale, SMALLEST).to(tl.float32)
    back = to_float32(to_dtype(steps * to_float32(scale)[:, None], DTYPE))
    difference = back.to(tl.float64) - weight.to(tl.float64)
    return tl.sum(difference * difference, axis=1)


@triton.jit
def _neighbour(scale, STEP: tl.constexpr):
    return (scale.to(tl.int16, bitcast=True) + STEP).to(tl.int16).to(scale.dtype, bitcast=True)


@triton.jit
def _quantize_int4_kernel(
    weight_ptr,
    packed_ptr,
    scale_ptr,
    fault_ptr,
    groups,
    DIVISOR: tl.constexpr,
    SMALLEST: tl.constexpr,
    SEARCHES: tl.constexpr,
    TINY: tl.constexpr,
    SCALE_DTYPE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * GROUPS
    group = tl.arange(0, GROUPS)
    live = group < groups - start
    offsets = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    stored = tl.load(weight_ptr + start * GROUP + offsets, mask=live[:, None], other=0)
    weight = to_float32(stored)
    bits = tl.max(weight.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    amax = bits.to(tl.float32, bitcast=True)
    scale = tl.div_rn(amax, tl.full((GROUPS,), DIVISOR, tl.float32))
    scale = tl.where(bits == 0, 1.0, tl.maximum(scale, 2.0**-126))
    scale = to_dtype(tl.maximum(scale, TINY), SCALE_DTYPE)
    if SEARCHES:
        above, below = _neighbour(scale, 1), _neighbour(scale, -1)
        least = _squared_error(weight, scale, SMALLEST, stored.dtype)
        error = _squared_error(weight, above, SMALLEST, stored.dtype)
        best = tl.where(
            error < least, above.to(tl.int16, bitcast=True), scale.to(tl.int16, bitcast=True)
        )
        least = tl.minimum(least, error)
        error = _squared_error(weight, below, SMALLEST, stored.dtype)
        best = tl.where(error < least, below.to(tl.int16, bitcast=True), best)
        scale = best.to(SCALE_DTYPE, bitcast=True)
    codes = _steps(weight, scale, SMALLEST) + 8
    places = tl.arange(0, 8)[None, None, :] * 4
    words = tl.sum(tl.reshape(codes, (GROUPS, GROUP // 8, 8)) << places, axis=2)
    offsets = group[:, None] * (GROUP // 8) + tl.arange(0, GROUP // 8)[None, :]
    tl.store(packed_ptr + start * (GROUP // 8) + offsets, words, mask=live[:, None])
    tl.store(scale_ptr + start + group, scale, mask=live)
    flag = fault_ptr + tl.zeros((GROUPS,), tl.int32)
    tl.store(flag, 1, mask=live & (bits >= 0x7F800000))
