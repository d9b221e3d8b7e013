"""What an evaluation of text and media measured: totals, each line, and how vision compares."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from k3quant.eval.data_divergence import KindDivergence
from k3quant.eval.layer_meter import LayerDivergence
from k3quant.eval.result import perplexity
from k3quant.eval.settings import EvalSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class LineScore:
    """What was measured on one line.

    Attributes:
        number: 1-based line of the file.
        tokens: Ids it was read as, media included.
        media_tokens: Those that are features of media.
        nll: `[n]` float64 nats of each scored id.
        kld: `[n]` float64 nats; None without a reference.
    """

    number: int
    tokens: int
    media_tokens: int
    nll: Tensor = field(repr=False)
    kld: Tensor | None = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return its part of a report's summary; means are null where nothing is scored."""
        scored = len(self.nll)
        summary = {
            "line": self.number,
            "tokens": self.tokens,
            "media_tokens": self.media_tokens,
            "tokens_scored": scored,
            "nll_sum": float(self.nll.sum()),
            "nll_mean": float(self.nll.mean()) if scored else None,
        }
        if self.kld is not None:
            summary["kld_mean"] = float(self.kld.mean()) if scored else None
        return summary


@dataclass(frozen=True, slots=True, kw_only=True)
class DataDivergence:
    """What a comparison found.

    Attributes:
        kld_mean: Mean KL(reference || candidate) of the scored positions, nats.
        kld_p99: Their 99th percentile.
        top1_agreement: Share of scored positions with the same likeliest id.
        reference_nll_mean: Mean nats of a scored id under the reference.
        features: Error of the features; None where no line has media. Its layer is -1.
        kinds: Errors at text and at media tokens, layer by layer.
    """

    kld_mean: float
    kld_p99: float
    top1_agreement: float
    reference_nll_mean: float
    features: LayerDivergence | None
    kinds: dict[str, KindDivergence]

    def to_json(self) -> dict[str, Any]:
        """Return the part of a report's summary that a comparison adds."""
        features = self.features
        return {
            "kld_mean": self.kld_mean,
            "kld_p99": self.kld_p99,
            "top1_agreement": self.top1_agreement,
            "reference_nll_mean": self.reference_nll_mean,
            "features": features and {"rel_error": features.rel_error, "cosine": features.cosine},
        } | {name: kind.to_json() for name, kind in self.kinds.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class DataResult:
    """What an evaluation of text and media measured.

    Attributes:
        settings: How it was done.
        lines: Each line's scores.
        media: Pictures and chunks of videos.
        tokens_sha256: Digest of the ids.
        tokenizer_sha256: Digest of the checkpoint's tokenizer.
        seconds: Wall time.
        bytes_read: Bytes of weights that were read.
        divergence: What a comparison found; None without a reference.
    """

    settings: EvalSettings
    lines: tuple[LineScore, ...]
    media: int
    tokens_sha256: str
    tokenizer_sha256: str
    seconds: float
    bytes_read: int
    divergence: DataDivergence | None

    @property
    def tokens_scored(self) -> int:
        """Number of ids that were scored."""
        return sum(len(line.nll) for line in self.lines)

    @property
    def nll_sum(self) -> float:
        """Nats of all scored ids."""
        return float(torch.cat([line.nll for line in self.lines]).sum())

    @property
    def nll_mean(self) -> float:
        """Mean nats of a scored id."""
        return self.nll_sum / self.tokens_scored

    def to_json(self) -> dict[str, Any]:
        """Return the summary of a report."""
        ppl = perplexity(self.nll_mean)
        summary = {
            "tokens_scored": self.tokens_scored,
            "nll_sum": self.nll_sum,
            "nll_mean": self.nll_mean,
            "ppl": ppl if np.isfinite(ppl) else None,
            "dtype": self.settings.dtype,
            "media": self.media,
            "media_tokens": sum(line.media_tokens for line in self.lines),
            "tokens_sha256": self.tokens_sha256,
            "tokenizer_sha256": self.tokenizer_sha256,
            "seconds": self.seconds,
            "bytes_read": self.bytes_read,
            "lines": [line.to_json() for line in self.lines],
        }
        return summary | (self.divergence.to_json() if self.divergence else {})
