"""What a synthetic tensor's values look like, so that every activation stays finite.

Codes of packed weights are uniform. Scale bytes lie in the ranges read from layer 1 of the
release (w1 110 to 123, w3 110 to 122, w2 119 to 122), most of them where a product keeps the size
of its input. Norms lie near 1, other matrices are normal with variance 1 / inputs.
"""

import math
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from k3quant.models.k3_config import K3Config
from k3quant.models.k3_tensors import TensorSpec
from k3quant.synth.stream import WORD_BYTES, Stream, look_up

WIDE = 1 << 16
"""Elements of a table that a 16-bit random number chooses from."""

_W1 = {
    110: 1, 111: 1, 112: 1, 113: 2, 114: 3, 115: 5, 116: 9, 117: 20, 118: 45, 119: 80, 120: 60,
    121: 22, 122: 5, 123: 2,
}  # fmt: skip
_SCALE_BYTES = {
    "expert.w1": _W1,
    "expert.w3": {byte: count for byte, count in _W1.items() if byte < 123} | {119: 82},
    "expert.w2": {119: 120, 120: 100, 121: 32, 122: 4},
}
_NORM_SPREAD = 0.05
_BIAS_SPREAD = 0.01
_POSITION_SPREAD = 0.02
_LOG_DECAY = (0.0, math.log(16.0))  # A_log: decay rates of 1 to 16
_DECAY_BIAS = (-3.0, 0.0)


@dataclass(frozen=True, slots=True)
class Values:
    """How a tensor's random numbers become its elements.

    Attributes:
        table: Element of each random number: 256 bytes, or 65,536 bfloat16 as their 16 bits, or
            65,536 float32; None keeps random bytes as they are.
        live: Elements that are not zero, from the first on; None where all are.
    """

    table: npt.NDArray[Any] | None
    live: int | None = None

    def fill(self, stream: Stream, first: int, count: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of some elements.

        Args:
            stream: The tensor's random numbers.
            first: Number of the first element.
            count: How many.
        """
        wide = self.table is not None and len(self.table) == WIDE
        width = 2 if wide else 1
        skip, begin = first * width % WORD_BYTES, first * width // WORD_BYTES
        words = np.empty(-(-(skip + count * width) // WORD_BYTES), dtype=np.uint64)
        stream.fill(words, begin)
        raw = words.view(np.uint8)[skip : skip + count * width]
        numbers = raw.view(np.uint16) if wide else raw
        if self.table is None:
            return raw
        if self.table.dtype == numbers.dtype:
            look_up(numbers, self.table)
            return raw
        elements = self.table[numbers]
        if self.live is not None:
            elements[max(self.live - first, 0) :] = 0
        return elements.view(np.uint8)


def values_of(spec: TensorSpec, config: K3Config) -> Values:
    """Return the values that a tensor of the table gets."""
    if spec.part == "packed":
        return Values(None)
    if spec.part == "scale":
        return Values(_bytes_table(spec.role))
    if spec.role == "kda.A_log":
        return Values(_uniform(*_LOG_DECAY), live=config.kda.num_heads)
    if spec.role == "kda.dt_bias":
        return Values(_uniform(*_DECAY_BIAS))
    return Values(_normal(*_mean_and_spread(spec), spec.dtype))


def _mean_and_spread(spec: TensorSpec) -> tuple[float, float]:
    if spec.role == "moe.bias":
        return 0.0, _BIAS_SPREAD
    if len(spec.shape) == 1:
        return 1.0, _NORM_SPREAD
    if spec.role == "embed_tokens":
        return 0.0, 1.0
    if spec.role == "vision.pos_emb":
        return 0.0, _POSITION_SPREAD
    return 0.0, math.prod(spec.shape[1:]) ** -0.5


@cache
def _bytes_table(role: str) -> npt.NDArray[np.uint8]:
    counts = _SCALE_BYTES[role]
    assert sum(counts.values()) == 256
    return np.repeat(np.array(list(counts), dtype=np.uint8), list(counts.values()))


@cache
def _uniform(low: float, high: float) -> npt.NDArray[np.float32]:
    middles = (np.arange(WIDE) + 0.5) / WIDE
    return (low + (high - low) * middles).astype(np.float32)


@cache
def _normal(mean: float, spread: float, dtype: str) -> npt.NDArray[Any]:
    values = (mean + spread * _quantiles()).astype(np.float32)
    if dtype == "F32":
        return values
    assert dtype == "BF16"
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)  # to nearest, ties to even


@cache
def _quantiles() -> npt.NDArray[np.float64]:
    normal = NormalDist()
    return np.array([normal.inv_cdf((i + 0.5) / WIDE) for i in range(WIDE)])
