"""What a float tensor holds, counted in one pass; reference: torch.isnan, isinf, abs().max().

Exponents are counted as stored: field 0 holds zeros and subnormals, the last NaN and infinity.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS = 2048
_WARPS = 4
_PROGRAMS = 1056  # eight for each of 132 multiprocessors

# Fraction bits and exponent bits.
_LAYOUT = {torch.float32: (23, 8), torch.bfloat16: (7, 8), torch.float16: (10, 5)}


class FloatCounts(NamedTuple):
    """Counts over one tensor, on its device.

    Attributes:
        exponents: `[256]` int64, elements by exponent field.
        nan: int64 scalar.
        inf: int64 scalar, infinities of either sign.
        zeros: int64 scalar, zeros of either sign.
        amax: Scalar of the tensor's dtype, the largest finite magnitude, 0 where none is finite.
    """

    exponents: Tensor
    nan: Tensor
    inf: Tensor
    zeros: Tensor
    amax: Tensor


def count_floats(tensor: Tensor) -> FloatCounts:
    """Count exponents, NaN, infinities and zeros, and find the largest finite magnitude.

    Args:
        tensor: Any shape, float32, bfloat16 or float16.
    """
    tensor = tensor.contiguous()
    fraction, exponent = _LAYOUT[tensor.dtype]
    word = torch.int32 if tensor.dtype == torch.float32 else torch.int16
    exponents = torch.zeros(256, dtype=torch.int64, device=tensor.device)
    counts = torch.zeros(3, dtype=torch.int64, device=tensor.device)
    largest = torch.zeros((), dtype=torch.int32, device=tensor.device)
    if tensor.numel():
        programs = min(_PROGRAMS, triton.cdiv(tensor.numel(), _ELEMENTS))
        _count_floats_kernel[(programs,)](
            tensor.view(word),
            exponents,
            counts,
            largest,
            tensor.numel(),
            programs,
            FRACTION=fraction,
            EXPONENT=exponent,
            ELEMENTS=_ELEMENTS,
            num_warps=_WARPS,
        )
    amax = largest.to(word).view(tensor.dtype)
    return FloatCounts(exponents, counts[0], counts[1], counts[2], amax)


@triton.jit
def _count_floats_kernel(
    bits_ptr,
    exponents_ptr,
    counts_ptr,
    largest_ptr,
    elements,
    programs,
    FRACTION: tl.constexpr,
    EXPONENT: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    INFINITY: tl.constexpr = ((1 << EXPONENT) - 1) << FRACTION
    MAGNITUDE: tl.constexpr = (1 << (FRACTION + EXPONENT)) - 1
    bins = tl.arange(0, 256)
    exponents = tl.zeros((256,), tl.int64)
    nan = tl.zeros((ELEMENTS,), tl.int32)
    inf = tl.zeros((ELEMENTS,), tl.int32)
    zeros = tl.zeros((ELEMENTS,), tl.int32)
    largest = tl.zeros((ELEMENTS,), tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(elements, ELEMENTS), programs):
        start = tile * tl.full((), ELEMENTS, tl.int64)
        offsets = tl.arange(0, ELEMENTS)
        live = offsets < elements - start
        bits = tl.load(bits_ptr + start + offsets, mask=live, other=0).to(tl.int32) & MAGNITUDE
        exponents += tl.histogram(bits >> FRACTION, 256).to(tl.int64)
        beyond = ELEMENTS - tl.sum(live.to(tl.int32), axis=0)
        exponents -= tl.where(bins == 0, beyond, 0)
        nan += (bits > INFINITY).to(tl.int32)
        inf += (bits == INFINITY).to(tl.int32)
        zeros += (live & (bits == 0)).to(tl.int32)
        largest = tl.maximum(largest, tl.where(bits < INFINITY, bits, 0))
    tl.atomic_add(exponents_ptr + bins, exponents, mask=exponents > 0)
    tl.atomic_add(counts_ptr, tl.sum(nan.to(tl.int64), axis=0))
    tl.atomic_add(counts_ptr + 1, tl.sum(inf.to(tl.int64), axis=0))
    tl.atomic_add(counts_ptr + 2, tl.sum(zeros.to(tl.int64), axis=0))
    tl.atomic_max(largest_ptr, tl.max(largest, axis=0))
