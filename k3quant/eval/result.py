"""What an evaluation measured, and its published form."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from k3quant.checkpoint.writer import ShardWriter
from k3quant.eval.divergence import Divergence
from k3quant.eval.settings import EvalSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """What an evaluation measured.

    Attributes:
        settings: How it was done.
        nll: `[tokens_scored]` float64, nats of each scored id, documents one behind the other.
        documents: Documents that were given.
        windows: Windows that were read.
        tokens_sha256: Digest of the ids, see `digest_ids`.
        tokenizer_sha256: Digest of the checkpoint's tokenizer; None where it has none.
        seconds: Wall time.
        bytes_read: Bytes of weights that were read, of both checkpoints in a comparison.
        checkpoint: The checkpoint's name.
        checkpoint_bytes: Bytes of its tensors.
        resumed_after: Layer after which a saved state was taken up, -1 for the embedding; None
            where the walk began with the first layer.
        divergence: What a comparison with a reference found; None without a reference.
    """

    settings: EvalSettings
    nll: npt.NDArray[np.float64] = field(repr=False)
    documents: int
    windows: int
    tokens_sha256: str
    tokenizer_sha256: str | None
    seconds: float
    bytes_read: int
    checkpoint: str = ""
    checkpoint_bytes: int = 0
    resumed_after: int | None = None
    divergence: Divergence | None = None

    @property
    def tokens_scored(self) -> int:
        """Number of ids that were scored."""
        return len(self.nll)

    @property
    def nll_mean(self) -> float:
        """Mean nats of a scored id."""
        return float(self.nll.mean())

    @property
    def ppl(self) -> float:
        """exp(nll_mean); infinity beyond what a float holds."""
        return perplexity(self.nll_mean)

    def to_json(self) -> dict[str, Any]:
        """Return the summary of a report."""
        summary: dict[str, Any] = {
            "checkpoint": self.checkpoint,
            "checkpoint_bytes": self.checkpoint_bytes,
            "tokens_scored": self.tokens_scored,
            "nll_mean": self.nll_mean,
            "ppl": self.ppl if math.isfinite(self.ppl) else None,
            "context": self.settings.ctx,
            "stride": self.settings.step,
            "bos": self.settings.bos,
            "dtype": self.settings.dtype,
            "device": self.settings.device,
            "documents": self.documents,
            "windows": self.windows,
            "tokens_sha256": self.tokens_sha256,
            "tokenizer_sha256": self.tokenizer_sha256,
            "seconds": self.seconds,
            "bytes_read": self.bytes_read,
        }
        if self.resumed_after is not None:
            summary["resumed_after"] = self.resumed_after
        return summary | (self.divergence.to_json() if self.divergence else {})


def perplexity(nll_mean: float) -> float:
    """Return exp(nll_mean), infinity beyond what a float holds."""
    try:
        return math.exp(nll_mean)
    except OverflowError:
        return math.inf


def write_nll(result: EvalResult, out: Path) -> None:
    """Write the nats of each scored id as `nll`, float64, to a safetensors file.

    Raises:
        ResourceError: The system refused.
    """
    with ShardWriter(out, [("nll", "F64", result.nll.shape)]) as writer:
        writer.write("nll", result.nll)
