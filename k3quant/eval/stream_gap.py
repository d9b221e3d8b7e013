"""How far two tensors are apart: relative error, cosine and signal-to-noise ratio."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from k3quant.models.rows import rows_per_block

NUM_SUMS = 4
DEVICE_ROWS = 1024  # of float64 copies on a device


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """How far a candidate's tensor is from the reference's.

    Attributes:
        rel_error: |candidate - reference| / |reference|; 0 where both are zero, None where only
            the reference is.
        cosine: Of the angle between the two; None where one is zero.
    """

    rel_error: float | None
    cosine: float | None

    @property
    def sqnr_db(self) -> float | None:
        """Signal-to-noise ratio in decibels; None where there is no noise or no signal."""
        return -20 * math.log10(self.rel_error) if self.rel_error else None

    def to_json(self, *, prefix: str = "") -> dict[str, float | None]:
        """Return the numbers ready for JSON."""
        numbers = {"rel_error": self.rel_error, "cosine": self.cosine, "sqnr_db": self.sqnr_db}
        return {prefix + name: number for name, number in numbers.items()}


def gap_sums(reference: Tensor, candidate: Tensor) -> Tensor:
    """Add up squares and products of two `[N, D]` tensors.

    Returns:
        `[4]` float64: |r|^2, |c|^2, r c, |c - r|^2, on the device if one of the two is there.
    """
    device = reference.device if reference.device.type != "cpu" else candidate.device
    sums = torch.zeros(NUM_SUMS, dtype=torch.float64, device=device)
    step = DEVICE_ROWS if device.type != "cpu" else rows_per_block(4 * reference.shape[-1])
    for pair in zip(torch.split(reference, step), torch.split(candidate, step), strict=True):
        r, c = (x.to(device).double().flatten() for x in pair)
        gap = c - r
        sums += torch.stack([r.dot(r), c.dot(c), r.dot(c), gap.dot(gap)])
    return sums


def gap_of(sums: Sequence[float]) -> Gap | None:
    """Return what four sums say; None where nothing was added up (NaN)."""
    reference, candidate, product, difference = sums
    if math.isnan(reference):
        return None
    norms = math.sqrt(reference * candidate)
    rel_error: float | None = None
    if reference > 0:
        rel_error = math.sqrt(difference / reference)
    elif difference == 0:
        rel_error = 0.0
    return Gap(rel_error=rel_error, cosine=product / norms if norms > 0 else None)
