"""Final hidden states in a file: the head can be done again, or compared later, without a walk.

Legend: n scored ids, D hidden.
"""

from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from k3quant import __version__
from k3quant.checkpoint.writer import ShardWriter
from k3quant.errors import RefusedError, SchemaError
from k3quant.eval.finite import check_finite
from k3quant.eval.head import negative_log_likelihood
from k3quant.eval.head_pair import PairScores, score_pair
from k3quant.eval.kl_summary import summarize_kl
from k3quant.eval.source import Model
from k3quant.eval.tensor_file import NAMES, raw_bytes, read_metadata, read_tensors

SAME = ("tokens_sha256", "context", "stride", "bos")


class HiddenWriter:
    """Writes what lm_head reads as `hidden` `[n, D]`, and `targets` `[n]`, a pass at a time."""

    def __init__(
        self, path: Path, *, rows: int, width: int, dtype: torch.dtype, facts: dict[str, str]
    ) -> None:
        """Plan the file.

        Args:
            path: Where to.
            rows: n.
            width: D.
            dtype: Of the activations.
            facts: What the states are of; kept as the file's metadata.
        """
        self._row = {"hidden": width * dtype.itemsize, "targets": torch.int64.itemsize}
        entries = [("hidden", NAMES[dtype], (rows, width)), ("targets", "I64", (rows,))]
        self._writer = ShardWriter(path, entries, metadata={"version": __version__} | facts)
        self._done = 0

    def __enter__(self) -> Self:
        self._writer.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.__exit__(*error)  # type: ignore[arg-type]

    def add(self, hidden: Tensor, targets: Tensor) -> None:
        """Write the next rows.

        Raises:
            ResourceError: The system refused.
        """
        for name, values in (("hidden", hidden), ("targets", targets)):
            self._writer.write_at(name, self._done * self._row[name], raw_bytes(values))
        self._done += len(targets)


def score_hidden(model: Model, hidden: Path) -> Tensor:
    """Do the head again, without a walk.

    Args:
        model: The model whose lm_head is to read the states.
        hidden: A file of `HiddenWriter`.

    Returns:
        `[n]` float64 nats of each scored id.

    Raises:
        SchemaError: The states are of another width, or an id is beyond the vocabulary.
        ValuesError: A value is NaN or infinite.
        IncompleteError: The file is gone or short.
    """
    states, targets = _read(model, hidden)
    nll = negative_log_likelihood(states, targets, model.head_blocks())
    check_finite(nll, model, None, "lm_head")
    return nll


def compare_hidden(
    candidate: Model, reference: Model, *, candidate_hidden: Path, reference_hidden: Path
) -> PairScores:
    """Compare two models' ends, without a walk.

    Raises:
        RefusedError: The two files are not of the same ids and windows.
        SchemaError: States do not fit a model.
        ValuesError: A value is NaN or infinite.
        IncompleteError: A file is gone or short.
    """
    ours, theirs = read_metadata(candidate_hidden), read_metadata(reference_hidden)
    for fact in SAME:
        if ours.get(fact) != theirs.get(fact):
            raise RefusedError(
                f"{candidate_hidden.name}: expected the reference's {fact} {theirs.get(fact)}, "
                f"got {ours.get(fact)}",
                hint="keep both sides' states with the same text and the same windows",
            )
    our_states, targets = _read(candidate, candidate_hidden)
    their_states, _ = _read(reference, reference_hidden)
    pair = score_pair(
        their_states, our_states, targets, reference.head_blocks(), candidate.head_blocks()
    )
    check_finite(pair.reference_nll, reference, None, "lm_head of the reference")
    check_finite(pair.candidate_nll, candidate, None, "lm_head")
    return pair


def rescore(
    candidate: tuple[Model, Path], reference: tuple[Model, Path] | None = None
) -> dict[str, Any]:
    """Do the head again and return the summary of a report.

    Args:
        candidate: A model and its states.
        reference: The same of a reference; None compares nothing.

    Raises:
        K3QuantError: As `score_hidden` and `compare_hidden`.
    """
    compared: dict[str, Any] = {}
    if reference is None:
        nll = score_hidden(*candidate)
    else:
        pair = compare_hidden(
            candidate[0],
            reference[0],
            candidate_hidden=candidate[1],
            reference_hidden=reference[1],
        )
        nll = pair.candidate_nll
        compared = summarize_kl(pair.kld, pair.confidence).to_json() | {
            "top1_agreement": float(pair.same_top1.double().mean()),
            "reference_nll_mean": float(pair.reference_nll.numpy().mean()),
        }
    mean = float(nll.numpy().mean())
    return {"tokens_scored": len(nll), "nll_mean": mean, **compared}


def _read(model: Model, path: Path) -> tuple[Tensor, Tensor]:
    tensors = read_tensors(path)
    hidden, targets = tensors.get("hidden"), tensors.get("targets")
    if hidden is None or targets is None:
        raise SchemaError(f"{path.name}: expected hidden and targets, got {sorted(tensors)}")
    D, V = model.config.hidden_size, model.config.vocab_size
    if hidden.ndim != 2 or hidden.shape[-1] != D or len(targets) != len(hidden):
        raise SchemaError(f"{path.name}: expected states of width {D}, got {list(hidden.shape)}")
    if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < V:
        raise SchemaError(f"{path.name}: expected ids below {V}, got {int(targets.max())}")
    return hidden.to(model.device), targets
