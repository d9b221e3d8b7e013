"""NVFP4: groups of 16 E2M1 codes under one E4M3 scale byte, one float32 scale for the tensor.

Example: the tensor's amax 6.0 gives the divisor 448 (or the multiplier 1 / 448); the group that
holds it gets scale byte 0x7E (448), and code 7 decodes to 6 * 448 / 448 = 6.0.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from k3quant.errors import ValuesError
from k3quant.formats import faults
from k3quant.formats.blocks import (
    amax_of_runs,
    check_overflow,
    check_packed,
    first_place,
    join_runs,
    quotient,
    split_runs,
)
from k3quant.formats.e2m1 import E2M1_MAX, decode_e2m1, encode_e2m1, pack_nibbles, unpack_nibbles
from k3quant.formats.e4m3 import E4M3_MAX, E4M3_MAX_CODE, decode_e4m3, encode_e4m3

NVFP4_GROUP_SIZE = 16
NVFP4_RANGE = E2M1_MAX * E4M3_MAX
"""The largest code under the largest group scale, 2688."""

E4M3_ONE = 0x38

# Group scales reach down to 2^-9; their product with the tensor's scale must stay normal.
_MIN_MULTIPLIER = 2.0**-117
# The largest value a group can hold must not overflow after the scales were rounded.
_MAX_AMAX = 2.0**128 * (1 - 2.0**-20)


class GlobalConvention(StrEnum):
    """Which way the tensor's scale is stored.

    Attributes:
        DIVISOR: value = code * group scale / global, as compressed-tensors' weight_global_scale.
        MULTIPLIER: value = code * group scale * global, as ModelOpt's weight_scale_2.
    """

    DIVISOR = "divisor"
    MULTIPLIER = "multiplier"


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalScale:
    """The tensor's scale, with the convention that says how to apply it.

    Attributes:
        value: A finite positive float32 number.
        convention: Whether `value` divides or multiplies.
    """

    value: float
    convention: GlobalConvention

    def __post_init__(self) -> None:
        """Refuse what would turn the tensor into zeros or infinities."""
        if not (math.isfinite(self.value) and self.value > 0):
            raise ValuesError(
                f"global scale: expected a finite positive number, got {self.value}",
                hint="the checkpoint is damaged, or its global scale was never computed",
            )

    def apply(self, local: Tensor) -> Tensor:
        """Return the float32 scale of each group from its decoded E4M3 scale."""
        return quotient(local, self.value) if self._divides else local * self.value

    def local_of(self, amax: Tensor) -> Tensor:
        """Return the unrounded float32 group scale that puts `amax` at code 7."""
        if self._divides:
            return quotient(amax, E2M1_MAX) * self.value
        # A scalar product in float32, as it is done on tensors.
        return quotient(amax, float(torch.tensor(self.value, dtype=torch.float32) * E2M1_MAX))

    @property
    def _divides(self) -> bool:
        return self.convention is GlobalConvention.DIVISOR


def global_scale_of_amax(amax: float, convention: GlobalConvention) -> GlobalScale:
    """Return the scale that puts `amax` at code 7 under group scale 448.

    Args:
        amax: Largest magnitude of the tensor, or of all tensors that share the scale.
        convention: How the scale will be stored.

    Returns:
        2688 / amax or amax / 2688 in float32; 1.0 for an all-zero tensor. Tensors smaller than
        2688 * 2^-117 get that end of the range, and smaller group scales.

    Raises:
        ValuesError: `amax` is NaN or infinite.

    Source: vllm-project/compressed-tensors, `quantization/utils/helpers.py`,
        `generate_gparam`; NVIDIA/Model-Optimizer, `quantization/qtensor/nvfp4_tensor.py`.
    """
    if not math.isfinite(amax):
        raise ValuesError(f"amax: expected a finite number, got {amax}")
    if amax == 0:
        return GlobalScale(value=1.0, convention=convention)
    bounded = torch.tensor(
        min(max(amax, NVFP4_RANGE * _MIN_MULTIPLIER), _MAX_AMAX), dtype=torch.float32
    )
    divides = convention is GlobalConvention.DIVISOR
    value = NVFP4_RANGE / bounded if divides else bounded / NVFP4_RANGE
    return GlobalScale(value=float(value), convention=convention)


def global_scale_of_exponent(exponent: int, convention: GlobalConvention) -> GlobalScale:
    """Return the power of two 2^exponent as a multiplier, or its reciprocal as a divisor.

    Raises:
        ValueError: The multiplier or the divisor is no normal float32.
    """
    if not -126 <= exponent <= 126:
        raise ValueError(f"exponent: expected -126..126, got {exponent}")
    divides = convention is GlobalConvention.DIVISOR
    return GlobalScale(value=2.0 ** (-exponent if divides else exponent), convention=convention)


def quantize_nvfp4(weight: Tensor, global_scale: GlobalScale) -> tuple[Tensor, Tensor]:
    """Round values to NVFP4 under a given tensor scale.

    Args:
        weight: `[..., cols]` float32, bfloat16 or float16, columns a multiple of 16.
        global_scale: The tensor's scale, see `global_scale_of_amax`.

    Returns:
        `[..., cols / 2]` uint8, the even column in the low nibble, and `[..., cols / 16]` uint8
        E4M3 group scales. Elements are divided by the rounded group scale. An all-zero group gets
        group scale 1.0, one whose scale would round to zero gets 2^-9, the smallest; zeros keep
        their sign.

    Raises:
        SchemaError: The columns are no multiple of 16.
        ValuesError: A value is NaN or infinite.
    """
    groups = split_runs(weight, NVFP4_GROUP_SIZE)
    amax = amax_of_runs(groups).float()
    scale_e4m3 = encode_e4m3(global_scale.local_of(amax)).clamp(min=1)
    scale_e4m3 = scale_e4m3.masked_fill(amax == 0, E4M3_ONE)
    scale = global_scale.apply(decode_e4m3(scale_e4m3))
    codes = encode_e2m1(groups.float() / scale[..., None])
    return pack_nibbles(join_runs(codes)), scale_e4m3


def dequantize_nvfp4(
    packed: Tensor,
    scale_e4m3: Tensor,
    global_scale: GlobalScale,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Compute code * group scale * tensor scale in float32.

    Args:
        packed: `[..., cols / 2]` uint8, low nibble first.
        scale_e4m3: `[..., cols / 16]` uint8 E4M3 group scales.
        global_scale: The tensor's scale and its convention.
        dtype: Floating dtype of the result.

    Returns:
        `[..., cols]` in `dtype`.

    Raises:
        SchemaError: The scale grid does not fit the packed columns.
        ValuesError: A group scale is NaN or negative, or a value overflows `dtype`.
    """
    check_packed(packed, scale_e4m3, NVFP4_GROUP_SIZE)
    check_group_scales(scale_e4m3)
    codes = split_runs(decode_e2m1(unpack_nibbles(packed)), NVFP4_GROUP_SIZE)
    groups = (codes * global_scale.apply(decode_e4m3(scale_e4m3))[..., None]).to(dtype)
    check_overflow(groups, scale_e4m3)
    return join_runs(groups)


def check_group_scales(scale_e4m3: Tensor) -> None:
    """Refuse group scales that are NaN or carry a sign.

    Args:
        scale_e4m3: `[..., groups]` uint8 E4M3 bytes.

    Raises:
        ValuesError: A byte is above 0x7E; names the first and says how many.
    """
    bad = scale_e4m3 > E4M3_MAX_CODE
    if bool(bad.any()):
        raise faults.bad_group_scale(first_place(bad), int(scale_e4m3[bad][0]), int(bad.sum()))
