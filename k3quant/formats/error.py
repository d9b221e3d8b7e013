"""How far a weight moved: sums over pieces of any size, in float64, then one record.

Zeros never make NaN: a ratio without a signal is None.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from k3quant.formats.error_sums import ErrorSums

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
        self._sums = ErrorSums()
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

    def add_sums(self, sums: ErrorSums) -> None:
        """Add a piece that a kernel has compared."""
        self._sums += sums

    def result(self) -> WeightError:
        """Return the record of all pieces so far."""
        sums = self._sums
        if sums.signal > 0:
            rel_rms: float | None = math.sqrt(sums.noise / sums.signal)
        else:
            rel_rms = 0.0 if sums.noise == 0 else None
        ratio = sums.signal / sums.noise if sums.noise > 0 else 0.0
        return WeightError(
            count=sums.count,
            max_abs=sums.max_abs,
            rel_rms=rel_rms,
            sqnr_db=10 * math.log10(ratio) if ratio > 0 else None,
            saturated=self._saturated,
            flushed=sums.flushed,
            not_finite=self._not_finite,
            exact=sums.equal == sums.count,
        )

    def _add_piece(self, reference: Tensor, candidate: Tensor) -> None:
        count, equal = reference.numel(), int((reference == candidate).sum())
        finite = torch.isfinite(reference) & torch.isfinite(candidate)
        whole = int(finite.sum())
        self._not_finite += count - whole
        if whole < count:
            reference, candidate = reference[finite], candidate[finite]
        if not whole:
            self._sums += ErrorSums(count=count, equal=equal)
            return
        noise = candidate - reference
        self._sums += ErrorSums(
            count=count,
            equal=equal,
            max_abs=float(noise.abs().max()),
            noise=float(noise.square().sum()),
            signal=float(reference.square().sum()),
            flushed=int(((reference != 0) & (candidate == 0)).sum()),
        )


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
