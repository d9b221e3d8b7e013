"""E8M0, the scale byte of MX formats: byte b is 2^(b - 127), byte 255 is NaN, there is no zero.

Example: 0 is 2^-127 (a float32 subnormal), 127 is 1.0, 254 is 2^127.
"""

import torch
from torch import Tensor

from k3quant.formats import faults
from k3quant.formats.blocks import first_place
from k3quant.formats.mx import (
    E2M1_ELEMENT,
    E4M3_ELEMENT,
    E8M0_BIAS,
    E8M0_NAN,
    MxElement,
    ScaleRounding,
)

__all__ = [
    "E2M1_ELEMENT",
    "E4M3_ELEMENT",
    "E8M0_BIAS",
    "E8M0_NAN",
    "MxElement",
    "ScaleRounding",
    "check_scales",
    "decode_e8m0",
    "encode_e8m0",
    "scale_from_amax",
    "two_to",
]

_FLOAT64_BIAS = 1023
_FLOAT64_FRACTION = 52


def decode_e8m0(scale_e8m0: Tensor) -> Tensor:
    """Turn scale bytes into float32, exactly.

    Args:
        scale_e8m0: Any shape, uint8.

    Returns:
        float32 in the same shape; byte 0 gives the subnormal 2^-127, byte 255 gives NaN.
    """
    byte = scale_e8m0.int()
    bits = byte << 23
    bits = bits.masked_fill(byte == 0, 0x0040_0000)  # 2^-127
    bits = bits.masked_fill(byte == E8M0_NAN, 0x7FC0_0000)
    return bits.view(torch.float32)


def encode_e8m0(scale: Tensor) -> Tensor:
    """Turn powers of two into scale bytes, exactly.

    Args:
        scale: Any shape, float32; NaN gives byte 255.

    Returns:
        uint8 in the same shape.

    Raises:
        ValueError: A scale is neither NaN nor a power of two from 2^-127 to 2^127.
    """
    byte = (_float64_bits(scale) >> _FLOAT64_FRACTION) - _FLOAT64_BIAS + E8M0_BIAS
    byte = byte.clamp(0, 254).masked_fill(torch.isnan(scale), E8M0_NAN).to(torch.uint8)
    wrong = (decode_e8m0(byte) != scale) & ~torch.isnan(scale)
    if bool(wrong.any()):
        got = float(scale[wrong].flatten()[0])
        raise ValueError(f"e8m0: expected a power of two from 2^-127 to 2^127, got {got!r}")
    return byte


def scale_from_amax(amax: Tensor, rounding: ScaleRounding, *, element: MxElement) -> Tensor:
    """Choose scale bytes for blocks of the given largest magnitudes.

    Args:
        amax: Any shape, floating, finite, not negative.
        rounding: The rule.
        element: Format of the elements under the scale.

    Returns:
        uint8 in the same shape. An all-zero block gets byte 0, as does every block too small for
        the rule. Bytes end at `element.max_scale`, so that a block near the float32 limit
        saturates in its last values instead of decoding to infinity.

    Raises:
        ValueError: `amax` is negative, NaN or infinite.
    """
    if not bool((torch.isfinite(amax) & (amax >= 0)).all()):
        raise ValueError("amax: expected finite magnitudes, got a negative, NaN or infinity")
    # In float64 the float32 subnormals are normal, so one rule serves all.
    step = element.round_up_step(rounding, _FLOAT64_FRACTION)
    exponent = ((_float64_bits(amax) + step) >> _FLOAT64_FRACTION) - _FLOAT64_BIAS
    byte = exponent - element.max_exponent + E8M0_BIAS
    return byte.clamp(0, element.max_scale).to(torch.uint8)


def check_scales(scale_e8m0: Tensor) -> None:
    """Refuse scale byte 255, which is NaN.

    Args:
        scale_e8m0: `[..., blocks]` uint8.

    Raises:
        ValuesError: A byte is 255; names the first and says how many.
    """
    nan = scale_e8m0 == E8M0_NAN
    if bool(nan.any()):
        raise faults.nan_scale(first_place(nan), int(nan.sum()))


def two_to(exponent: Tensor) -> Tensor:
    """Return 2^exponent in float64, exactly; torch.ldexp goes through a float32 power.

    Args:
        exponent: Any shape, integers from -1022 to 1023.
    """
    return ((exponent.long() + _FLOAT64_BIAS) << _FLOAT64_FRACTION).view(torch.float64)


def _float64_bits(values: Tensor) -> Tensor:
    return values.double().view(torch.int64)
