"""How far a weight moved: sums over pieces of any size, in float64, then one record.

Zeros never make NaN: a ratio without a signal is None.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_PIECE = 1 << 18  # elements widened to float64 at a time; they stay in the cache


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightError:
    """The difference between a reference and a candidate.

    Attributes:
        count: Elements compared.
        max_abs: Largest |candidate - reference|.
        rel_rms: Root of (squared error / squared reference); None where only zeros were hit.
        sqnr_db: Signal to quantization noise ratio in dB; None for no error or no signal.
        saturated: Elements of the reference beyond the candidate's limit; None if none was given.
        flushed: Elements not zero in the reference and zero in the candidate.
        not_finite: Elements NaN or infinite on either side; they count in no other sum.
        exact: Whether every element has the same value; NaN equals nothing, -0.0 equals 0.0.
    """

    count: int
    max_abs: float
    rel_rms: float | None
    sqnr_db: float | None
    saturated: int | None
    flushed: int
    not_finite: int
    exact: bool


class ErrorSum:
    """Adds pieces of a tensor, or of many tensors, to one `WeightError`."""

    def __init__(self) -> None:
        self._count = 0
        self._equal = 0
        self._max_abs = 0.0
        self._noise = 0.0
        self._signal = 0.0
        self._flushed = 0
        self._not_finite = 0
        self._saturated: int | None = None

    def add(self, reference: Tensor, candidate: Tensor, *, limit: Tensor | None = None) -> None:
        """Add one piece.

        Args:
            reference: Any shape, floating.
            candidate: The same shape, floating.
            limit: Largest magnitude each element of the candidate could have, the same shape.

        Raises:
            ValueError: The shapes differ.
        """
        for other in (candidate, limit):
            if other is not None and other.shape != reference.shape:
                raise ValueError(f"shape: expected {reference.shape}, got {other.shape}")
        flat_limit = None if limit is None else limit.reshape(-1)
        flat_reference, flat_candidate = reference.reshape(-1), candidate.reshape(-1)
        for start in range(0, reference.numel(), _PIECE):
            piece = slice(start, start + _PIECE)
            self._add_piece(flat_reference[piece].double(), flat_candidate[piece].double())
            if flat_limit is not None:
                beyond = flat_reference[piece].abs().double() > flat_limit[piece].double()
                self._saturated = (self._saturated or 0) + int(beyond.sum())

    def result(self) -> WeightError:
        """Return the record of all pieces so far."""
        if self._signal > 0:
            rel_rms: float | None = math.sqrt(self._noise / self._signal)
        else:
            rel_rms = 0.0 if self._noise == 0 else None
        ratio = self._signal / self._noise if self._noise > 0 else 0.0
        return WeightError(
            count=self._count,
            max_abs=self._max_abs,
            rel_rms=rel_rms,
            sqnr_db=10 * math.log10(ratio) if ratio > 0 else None,
            saturated=self._saturated,
            flushed=self._flushed,
            not_finite=self._not_finite,
            exact=self._equal == self._count,
        )

    def _add_piece(self, reference: Tensor, candidate: Tensor) -> None:
        self._count += reference.numel()
        self._equal += int((reference == candidate).sum())
        finite = torch.isfinite(reference) & torch.isfinite(candidate)
        whole = int(finite.sum())
        self._not_finite += reference.numel() - whole
        if whole < reference.numel():
            reference, candidate = reference[finite], candidate[finite]
        if not whole:
            return
        noise = candidate - reference
        self._max_abs = max(self._max_abs, float(noise.abs().max()))
        self._noise += float(noise.square().sum())
        self._signal += float(reference.square().sum())
        self._flushed += int(((reference != 0) & (candidate == 0)).sum())


def weight_error(
    reference: Tensor, candidate: Tensor, *, limit: Tensor | None = None
) -> WeightError:
    """Compare two tensors of the same shape.

    Args:
        reference: Any shape, floating.
        candidate: The same shape, floating.
        limit: Largest magnitude each element of the candidate could have, for counting saturation.

    Returns:
        The difference; an empty tensor is exact.

    Raises:
        ValueError: The shapes differ.
    """
    total = ErrorSum()
    total.add(reference, candidate, limit=limit)
    return total.result()
