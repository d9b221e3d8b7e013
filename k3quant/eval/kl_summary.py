"""What a KL divergence at many positions says: its spread, and where the reference was sure."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

CONFIDENCE_EDGES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
# Half decades of nats; what lies below, zero among it, is counted apart.
HISTOGRAM_LOG10 = tuple(edge / 2 for edge in range(-24, 5))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfidenceBucket:
    """Positions at which the reference was about as sure.

    Attributes:
        low: Least probability of the reference's likeliest id.
        high: Where the next bucket begins; the last one holds 1 as well.
        count: Positions.
        kld_mean: Their mean KL, nats; None without any.
    """

    low: float
    high: float
    count: int
    kld_mean: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KlSummary:
    """KL(reference || candidate) of the scored positions, in nats.

    Attributes:
        mean: Their mean.
        median: Half of them lie below.
        p90: Nine tenths lie below.
        p99: 99 in a hundred lie below.
        maximum: The largest.
        buckets: By the reference's confidence.
        below: Positions below the histogram, those of zero among them.
        histogram: Positions of each half decade of `HISTOGRAM_LOG10`; the last holds all above.
    """

    mean: float
    median: float
    p90: float
    p99: float
    maximum: float
    buckets: tuple[ConfidenceBucket, ...]
    below: int
    histogram: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the part of a report's summary that is about KL."""
        return {
            "kld_mean": self.mean,
            "kld_median": self.median,
            "kld_p90": self.p90,
            "kld_p99": self.p99,
            "kld_max": self.maximum,
            "kld_by_confidence": [
                {"from": b.low, "to": b.high, "count": b.count, "kld_mean": b.kld_mean}
                for b in self.buckets
            ],
            "kld_histogram": {
                "log10_edges": list(HISTOGRAM_LOG10),
                "counts": list(self.histogram),
                "below": self.below,
            },
        }


def summarize_kl(kld: Tensor, confidence: Tensor) -> KlSummary:
    """Summarize KL.

    Args:
        kld: `[N]` float64 nats, at least one.
        confidence: `[N]` float64 probability of the reference's likeliest id.
    """
    below, histogram = _histogram(kld)
    return KlSummary(
        mean=float(kld.numpy().mean()),
        median=percentile(kld, 0.5),
        p90=percentile(kld, 0.9),
        p99=percentile(kld, 0.99),
        maximum=float(kld.max()),
        buckets=_buckets(kld, confidence),
        below=below,
        histogram=histogram,
    )


def percentile(values: Tensor, share: float) -> float:
    """Return a percentile, between two values by linear interpolation; any number of values."""
    ordered = values.sort().values
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return float(torch.lerp(ordered[low], ordered[high], place - low))


def _buckets(kld: Tensor, confidence: Tensor) -> tuple[ConfidenceBucket, ...]:
    inner = torch.tensor(CONFIDENCE_EDGES[1:-1], dtype=confidence.dtype)
    place = torch.bucketize(confidence, inner, right=True)
    buckets = []
    for i, (low, high) in enumerate(pairwise(CONFIDENCE_EDGES)):
        own = kld[place == i]
        mean = float(own.mean()) if len(own) else None
        buckets.append(ConfidenceBucket(low=low, high=high, count=len(own), kld_mean=mean))
    return tuple(buckets)


def _histogram(kld: Tensor) -> tuple[int, tuple[int, ...]]:
    edges = torch.tensor([10.0**edge for edge in HISTOGRAM_LOG10[:-1]], dtype=torch.float64)
    counts = torch.bucketize(kld, edges, right=True).bincount(minlength=len(edges) + 1).tolist()
    return counts[0], tuple(counts[1:])
