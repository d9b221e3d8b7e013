"""Integers under one scale a run: which ones a format uses, and the scale it stores, without torch.

The rule is that of `int4` and `int8_channel`, operation for operation in float32.
"""

from enum import StrEnum
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

ScaleDtype = Literal["F32", "BF16", "F16"]
"""How a scale is stored, as safetensors names it."""

_BF16_TINY = np.float32(2.0**-126)
_TINY = {"F32": _BF16_TINY, "BF16": _BF16_TINY, "F16": np.float32(2.0**-14)}


class IntGrid(NamedTuple):
    """The integers of a run.

    Attributes:
        divisor: What `amax` is divided by to get the scale.
        smallest: The lowest integer.
        largest: The highest integer.
        bits: Bits of a stored integer, 4 with 8 added or 8.
    """

    divisor: float
    smallest: int
    largest: int
    bits: int


class Int4Range(StrEnum):
    """Which integers a group uses.

    Attributes:
        FULL: -8..7 under amax / 7.5; the largest positive value of a group clips from 7.5 to 7.
        BALANCED: -7..7 under amax / 7, as the Kimi-K2 checkpoints.

    Source: FULL: vllm-project/compressed-tensors, `quantization/utils/helpers.py`,
        `calculate_qparams`.
    """

    FULL = "full"
    BALANCED = "balanced"

    @property
    def divisor(self) -> float:
        """What `amax` is divided by."""
        return 7.5 if self is Int4Range.FULL else 7.0

    @property
    def smallest(self) -> int:
        """The lowest integer."""
        return -8 if self is Int4Range.FULL else -7

    @property
    def grid(self) -> IntGrid:
        """The same as numbers."""
        return IntGrid(self.divisor, self.smallest, 7, 4)


INT8_DIVISOR = 127.5
"""Half the span of 255 steps."""

INT8_GRID = IntGrid(INT8_DIVISOR, -128, 127, 8)


def scales_of(amax: Floats, divisor: float, dtype: ScaleDtype) -> Floats:
    """Return the scale of each run, rounded to the type it is stored in.

    Args:
        amax: Any shape, finite.
        divisor: The amax that shall get scale 1.0.
        dtype: How the scale is stored.

    Returns:
        float32 in the same shape, 1.0 for zero and never subnormal; infinite where float16 does
        not reach.
    """
    scale: Floats = np.maximum(amax / np.float32(divisor), _TINY[dtype])
    scale[amax == 0] = 1.0
    return widen_scales(store_scales(scale, dtype), dtype)


def store_scales(scale: Floats, dtype: ScaleDtype) -> npt.NDArray[Any]:
    """Round scales to nearest even in the type they are stored in.

    Args:
        scale: Any shape, no NaN.
        dtype: How they are stored.

    Returns:
        float32, the bits of bfloat16 in uint16, or float16, in the same shape.
    """
    if dtype == "F32":
        return scale
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return scale.astype(np.float16)
    bits = scale.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def widen_scales(stored: npt.NDArray[Any], dtype: ScaleDtype) -> Floats:
    """Return what `store_scales` returned as float32."""
    if dtype == "BF16":
        bits = stored.astype(np.uint32) << 16
        return bits.view(np.float32)
    return stored.astype(np.float32, copy=False)
