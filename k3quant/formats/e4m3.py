"""E4M3, the 8-bit float without infinity: bias 7, largest value 448, bytes 0x7F and 0xFF are NaN.

Written with integer arithmetic throughout: what torch's own cast does beyond 448 has changed
between versions and devices. Example: 1.0 is 0x38, 448 is 0x7E, the smallest value 2^-9 is 0x01.
"""

from enum import StrEnum

import torch
from torch import Tensor

from k3quant.formats import faults

E4M3_MAX = 448.0
E4M3_NAN = 0x7F
E4M3_MAX_CODE = 0x7E
E4M3_MIN_EXPONENT = -9  # of the smallest subnormal
_SMALLEST_NORMAL_EXPONENT = -6
_MANTISSA_BITS = 3


class Overflow(StrEnum):
    """What becomes of magnitudes that round beyond 448.

    Attributes:
        SATURATE: 448 with the sign, also for infinity.
        NAN: 0x7F with the sign, also for infinity; 464, a tie, still rounds to the even 448.
    """

    SATURATE = "saturate"
    NAN = "nan"


def decode_e4m3(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Turn E4M3 bytes into values.

    Args:
        codes: Any shape, uint8.
        dtype: float32, bfloat16, float16 or float64; every value is exact in all of them.

    Returns:
        Values in the shape of `codes`; 0x80 gives -0.0, 0x7F and 0xFF give NaN.

    Source: OCP 8-bit Floating Point Specification (OFP8) v1.0, section 5.
    """
    byte = torch.arange(256, dtype=torch.int32, device=codes.device)
    field, mantissa = (byte >> _MANTISSA_BITS) & 0xF, byte & 0x7
    significand = mantissa + torch.where(field > 0, 8, 0)
    steps = significand << (field.clamp(min=1) - 1)  # of 2^-9
    table = steps.double() * 2.0**E4M3_MIN_EXPONENT
    table = torch.where(byte < 128, table, -table)
    table[(byte & 0x7F) == E4M3_NAN] = torch.nan
    return table.to(dtype)[codes.int()]


def encode_e4m3(values: Tensor, *, overflow: Overflow = Overflow.SATURATE) -> Tensor:
    """Round values to the nearest E4M3 byte, ties to even.

    Args:
        values: Any shape, float32, bfloat16 or float16.
        overflow: What magnitudes beyond 448 become.

    Returns:
        uint8 in the shape of `values`. NaN gives 0x7F; the sign of a zero, and of what rounds to
        zero, stays.

    Raises:
        ValueError: `values` is float64, which would be rounded twice.
    """
    if values.dtype == torch.float64:
        raise ValueError("e4m3: expected float32 or narrower, got float64")
    bits = values.float().view(torch.int32)
    magnitude = bits & 0x7FFF_FFFF
    exponent = (magnitude >> 23) - 127
    # All below 2^-12 rounds to zero, float32 subnormals too, so their missing hidden bit and the
    # clamp to a shift that int32 allows change nothing.
    significand = (magnitude & 0x007F_FFFF) | 0x0080_0000
    shift = 23 - _MANTISSA_BITS + (_SMALLEST_NORMAL_EXPONENT - exponent).clamp(0, 9)
    odd = (significand >> shift) & 1
    quotient = (significand + (1 << (shift - 1)) - 1 + odd) >> shift
    # A quotient of 16 carries into the next exponent by itself, as does 8 out of the subnormals.
    code = ((exponent.clamp(min=_SMALLEST_NORMAL_EXPONENT) + 6) << _MANTISSA_BITS) + quotient
    limit = E4M3_MAX_CODE if overflow is Overflow.SATURATE else E4M3_NAN
    code = code.clamp(max=limit).masked_fill(magnitude > 0x7F80_0000, E4M3_NAN)
    sign = torch.where(magnitude > 0x7F80_0000, 0, (bits >> 24) & 0x80)
    return (code | sign).to(torch.uint8)


def check_numbers(codes: Tensor) -> None:
    """Refuse NaN bytes.

    Args:
        codes: Any shape, uint8 E4M3 bytes.

    Raises:
        ValuesError: Names the first and says how many.
    """
    nan = (codes & 0x7F) == E4M3_NAN
    if bool(nan.any()):
        raise faults.nan_codes(f"element {nan.nonzero()[0].tolist()}", int(nan.sum()))
