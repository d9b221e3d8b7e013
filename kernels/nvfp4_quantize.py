"""Floats to NVFP4 under a given tensor scale; reference: formats.nvfp4.quantize_nvfp4."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3quant.errors import SchemaError
from k3quant.formats.e2m1 import E2M1_MAX
from k3quant.formats.nvfp4 import NVFP4_GROUP_SIZE, GlobalConvention, GlobalScale
from k3quant.kernels import bf16_pairs
from k3quant.kernels.float_pairs import are_words, larger, largest_of_rows, load_pairs
from k3quant.kernels.nvfp4_dequantize import group_scale
from k3quant.kernels.rounding import decode_e4m3_byte, divide, encode_e4m3_pair, split_divisor

_GROUPS = 512
_WARPS = 4


def quantize_nvfp4(weight: Tensor, global_scale: GlobalScale) -> tuple[Tensor, Tensor, Tensor]:
    """Round values to NVFP4 under a given tensor scale.

    Args:
        weight: `[..., cols]` float32, bfloat16 or float16, columns a multiple of 16.
        global_scale: The tensor's scale.

    Returns:
        `[..., cols / 2]` uint8, the even column in the low nibble; `[..., cols / 16]` uint8 E4M3
        group scales; and an int32 scalar that is 1 when a value is NaN or infinite, and the rest
        is then undefined.

    Raises:
        SchemaError: The columns are no multiple of 16.
    """
    *lead, cols = weight.shape
    if cols % NVFP4_GROUP_SIZE:
        raise SchemaError(f"columns: expected a multiple of {NVFP4_GROUP_SIZE}, got {cols}")
    weight = weight.contiguous()
    packed = torch.empty((*lead, cols // 2), dtype=torch.uint8, device=weight.device)
    grid_shape = (*lead, cols // NVFP4_GROUP_SIZE)
    scale_e4m3 = torch.empty(grid_shape, dtype=torch.uint8, device=weight.device)
    fault = torch.zeros((), dtype=torch.int32, device=weight.device)
    divides = global_scale.convention is GlobalConvention.DIVISOR
    # The product with 6 is rounded to float32 once, as the reference rounds it.
    six = float(torch.tensor(global_scale.value, dtype=torch.float32) * E2M1_MAX)
    amax_divisor = E2M1_MAX if divides else six
    usual = 2.0**-80 < global_scale.value < 2.0**80
    if scale_e4m3.numel():
        words = are_words(weight)
        _quantize_nvfp4_kernel[(triton.cdiv(scale_e4m3.numel(), _GROUPS),)](
            weight.view(torch.int32) if words else weight,
            packed,
            scale_e4m3,
            fault,
            scale_e4m3.numel(),
            global_scale.value,
            amax_divisor,
            *_split(amax_divisor),
            *_split(global_scale.value),
            DIVIDES=divides,
            WORDS=words,
            SHORT=weight.dtype != torch.float32,
            USUAL=usual,
            GROUPS=_GROUPS,
            num_warps=_WARPS,
        )
    return packed, scale_e4m3, fault


def _split(divisor: float) -> tuple[float, float, float]:
    """Return what `split_divisor` does, of a number that float32 holds."""
    fraction, exponent = math.frexp(divisor)
    inverse = torch.tensor(1.0) / torch.tensor(fraction * 2, dtype=torch.float32)
    return fraction * 2, 2.0 ** min(1 - exponent, 127), float(inverse)


@triton.jit
def _ratios(first, second, step, SHORT: tl.constexpr, USUAL: tl.constexpr):
    """Return the magnitudes of both over the group's scale."""
    first, second = tl.abs(first), tl.abs(second)
    if USUAL:
        mantissa, lift, inverse = split_divisor(step)
        first = divide(first, mantissa[:, None], lift[:, None], inverse[:, None], SHORT)
        second = divide(second, mantissa[:, None], lift[:, None], inverse[:, None], SHORT)
    else:
        step = step[:, None] + tl.zeros(first.shape, tl.float32)
        first, second = tl.div_rn(first, step), tl.div_rn(second, step)
    return first, second


@triton.jit
def _round_to_e2m1(ratio):
    """Round to the values of E2M1, and on in the same way beyond 6.

    The sum with a power of two whose last bit weighs one step of the value's octave rounds.
    """
    leading = tl.maximum(ratio, 1.0).to(tl.int32, bitcast=True) & 0x7F800000
    ruler = leading.to(tl.float32, bitcast=True)
    return (ratio + ruler * 2.0**22) + ruler * -(2.0**22)


@triton.jit
def _bytes(first, second, signs):
    """Return the packed codes of pairs of ratios, uint8."""
    values = bf16_pairs.pack(_round_to_e2m1(first), _round_to_e2m1(second))
    values = bf16_pairs.smaller(values, tl.full((1, 1), 0x40C040C0, tl.uint32))  # 6, also for NaN
    codes = bf16_pairs.multiply(values, tl.full((1, 1), 0x00800080, tl.uint32))  # 2^-126
    codes |= (signs >> 6) & 0x02000200
    # The product moves both nibbles, at bits 6 and 22, to the highest byte.
    return ((codes * 0x40040) >> 24).to(tl.uint8)


@triton.jit
def _quantize_nvfp4_kernel(
    weight_ptr,
    packed_ptr,
    scale_ptr,
    fault_ptr,
    groups,
    global_scale,
    amax_divisor,
    local_mantissa,
    local_lift,
    local_inverse,
    global_mantissa,
    global_lift,
    global_inverse,
    DIVIDES: tl.constexpr,
    WORDS: tl.constexpr,
    SHORT: tl.constexpr,
    USUAL: tl.constexpr,
    GROUPS: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * GROUPS
    weight_ptr += start * (8 if WORDS else 16)
    packed_ptr += start * 8
    group = tl.arange(0, GROUPS)
    live = group < groups - start
    mask = live[:, None]
    # Each half of a group is the widest load there is; a thread takes both, so that what a group
    # needs is computed once.
    pair = tl.max_contiguous(group[:, None] * 8 + tl.arange(0, 4)[None, :], [1, 4])
    place = pair if WORDS else 2 * pair
    first, second, signs, magnitude = load_pairs(weight_ptr, place, mask, mask, WORDS)
    place = pair + 4 if WORDS else 2 * pair + 8
    third, fourth, more_signs, more = load_pairs(weight_ptr, place, mask, mask, WORDS)
    largest = largest_of_rows(larger(magnitude, more, WORDS), WORDS)
    amax = largest.to(tl.float32, bitcast=True)
    if USUAL:
        local = divide(amax, local_mantissa, local_lift, local_inverse, SHORT)
    else:
        local = tl.div_rn(amax, tl.zeros((GROUPS,), tl.float32) + amax_divisor)
    if DIVIDES:
        local *= global_scale
    scale = tl.maximum((encode_e4m3_pair(local, local) & 0xFF).to(tl.uint32), 1)
    scale = tl.where(largest == 0, 0x38, scale)
    if DIVIDES and USUAL:
        step = decode_e4m3_byte(scale)
        step = divide(step, global_mantissa, global_lift, global_inverse, True)
    else:
        step = group_scale(scale, global_scale, DIVIDES)
    first, second = _ratios(first, second, step, SHORT, USUAL)
    third, fourth = _ratios(third, fourth, step, SHORT, USUAL)
    low, high = _bytes(first, second, signs), _bytes(third, fourth, more_signs)
    packed = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (GROUPS, 8))
    place = tl.max_contiguous(group[:, None] * 8 + tl.arange(0, 8)[None, :], [1, 8])
    tl.store(packed_ptr + place, packed, mask=mask)
    tl.store(scale_ptr + start + group, scale.to(tl.uint8), mask=live)
    flag = fault_ptr + tl.zeros((GROUPS,), tl.int32)
    tl.store(flag, 1, mask=live & (largest >= 0x7F800000))
