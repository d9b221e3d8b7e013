"""Perplexity of a checkpoint, evaluated layer by layer on one machine.

The mean is over all scored tokens, whatever windows and documents they come from.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from k3quant.checkpoint.reader import Checkpoint, open_checkpoint
from k3quant.checkpoint.writer import ShardWriter
from k3quant.errors import IncompleteError, ResourceError, UsageError
from k3quant.eval.checkpoint_model import CheckpointModel
from k3quant.eval.device_model import DeviceModel
from k3quant.eval.divergence import Divergence, DivergenceMeter, Subject, check_comparable
from k3quant.eval.executor import finish, run_layers, scored_rows
from k3quant.eval.finite import check_finite
from k3quant.eval.head import negative_log_likelihood
from k3quant.eval.memory import plan_passes
from k3quant.eval.source import Model
from k3quant.eval.tokens import check_ids, digest_ids, encode_text, read_documents
from k3quant.eval.windows import Ids, Window, plan_windows
from k3quant.models.k3_config import K3Config
from k3quant.models.tokenizer import RANKS_FILE, Tokenizer
from k3quant.progress import SILENT, Progress

OpenModel = CheckpointModel | DeviceModel
DEVICE_READ_THREADS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSettings:
    """How to evaluate.

    Attributes:
        ctx: Ids a window reads.
        stride: Ids between the starts of windows; None is `ctx`, windows that do not overlap.
        bos: Whether every window starts with the BOS id, beyond `ctx`; it is never scored.
        dtype: Of activations and decoded weights; norms, router, recurrent state, softmaxes and
            logits are float32 in either case.
        device: Where to compute.
        vram_bytes: Bound of the device's memory; None takes nine tenths of what is free.
        ram_bytes: Bound of the memory; tokens that do not fit together are evaluated in several
            passes over the checkpoint. None is no bound: one pass.
        ahead_bytes: Bytes that are read ahead of the computation.
        read_threads: Reads at a time.
    """

    ctx: int = 512
    stride: int | None = None
    bos: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    vram_bytes: int | None = None
    ram_bytes: int | None = None
    ahead_bytes: int = 1 << 30
    read_threads: int = 4

    def __post_init__(self) -> None:
        if self.ctx < 1:
            raise UsageError(f"ctx: expected at least 1, got {self.ctx}")
        if self.stride is not None and not 1 <= self.stride <= self.ctx:
            raise UsageError(f"stride: expected 1 to ctx {self.ctx}, got {self.stride}")
        if self.dtype not in ("float32", "bfloat16"):
            raise UsageError(f"dtype: expected float32 or bfloat16, got {self.dtype}")
        if self.device not in ("cpu", "cuda"):
            raise UsageError(f"device: expected cpu or cuda, got {self.device}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ResourceError(
                "device: expected a CUDA device, got none that torch can use",
                hint="install a build of torch with CUDA, or leave out --device",
            )
        if self.vram_bytes is not None and self.device == "cpu":
            raise UsageError("vram: expected --device cuda with it, got cpu")
        if self.read_threads < 1:
            raise UsageError(f"read_threads: expected at least 1, got {self.read_threads}")

    @property
    def pass_bytes(self) -> int | None:
        """Bound that tokens are cut into passes by; a device plans for all of them at once."""
        return self.ram_bytes if self.device == "cpu" else None

    @property
    def step(self) -> int:
        """Ids between the starts of windows."""
        return self.ctx if self.stride is None else self.stride


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
        summary = {
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
        return summary | (self.divergence.to_json() if self.divergence else {})


def perplexity(nll_mean: float) -> float:
    """Return exp(nll_mean), infinity beyond what a float holds."""
    try:
        return math.exp(nll_mean)
    except OverflowError:
        return math.inf


def evaluate(
    checkpoint: Path,
    *,
    text: Path | None = None,
    tokens: Path | None = None,
    reference: Path | None = None,
    settings: EvalSettings | None = None,
    progress: Progress = SILENT,
) -> EvalResult:
    """Score a text or token ids with a checkpoint, and with a reference beside it if asked.

    Args:
        checkpoint: Folder of the checkpoint.
        text: A text, encoded with the checkpoint's own tokenizer.
        tokens: A file of ids instead, see `read_documents`.
        reference: Folder of a checkpoint to compare with, walked in lockstep on the same ids.
        settings: How; None takes the defaults.
        progress: Is told about each layer.

    Returns:
        The result.

    Raises:
        UsageError: Both or neither of text and ids, or options the config does not allow.
        IncompleteError: Nothing to score, or something is missing or short.
        SchemaError: Config, tensors or ids do not agree.
        ValuesError: A value is NaN or infinite; names the first layer and the tensor.
        RefusedError: The reference is of another vocabulary, tokenizer or shape.
        ResourceError: A read failed, or the memory budget is too small.
    """
    started = time.perf_counter()
    settings = settings or EvalSettings()
    if (text is None) == (tokens is None):
        raise UsageError("eval: expected one of a text and a file of ids")
    count = 1 if reference is None else 2
    models = [
        open_model(folder, settings, share=count)
        for folder in (checkpoint, reference)
        if folder is not None
    ]
    given = [
        _subject(folder, model.config, text=text, tokens=tokens)
        for folder, model in zip((checkpoint, reference), models, strict=False)
        if folder is not None
    ]
    subject, documents = given[0]
    meter: DivergenceMeter | None = None
    if reference is not None:
        check_comparable(subject, given[1][0])
        meter = DivergenceMeter(models[0], models[1])
    windows = _plan(documents, subject.config, settings)
    nll = _score(models[0], meter, windows, settings, progress)
    return EvalResult(
        settings=settings,
        nll=nll,
        documents=len(documents),
        windows=len(windows),
        tokens_sha256=subject.tokens_sha256,
        tokenizer_sha256=subject.tokenizer_sha256,
        seconds=time.perf_counter() - started,
        bytes_read=sum(model.bytes_read for model in models),
        divergence=None if meter is None else meter.result(),
    )


def open_model(folder: Path, settings: EvalSettings, *, share: int = 1) -> OpenModel:
    """Open a checkpoint for evaluation; `share` walks divide budgets and what is read ahead."""
    return model_of(open_checkpoint(folder), settings, share=share)


def model_of(checkpoint: Checkpoint, settings: EvalSettings, *, share: int = 1) -> OpenModel:
    """Return an opened checkpoint as a model, as `open_model`."""
    dtype = torch.float32 if settings.dtype == "float32" else torch.bfloat16
    if settings.device == "cuda":
        return DeviceModel(
            checkpoint,
            dtype=dtype,
            device=torch.device("cuda"),
            vram_bytes=settings.vram_bytes,
            ram_bytes=settings.ram_bytes,
            threads=max(1, DEVICE_READ_THREADS // share),
            share=share,
        )
    return CheckpointModel(
        checkpoint,
        dtype=dtype,
        ahead_bytes=settings.ahead_bytes // share,
        threads=settings.read_threads,
    )


def write_nll(result: EvalResult, out: Path) -> None:
    """Write the nats of each scored id as `nll`, float64, to a safetensors file.

    Raises:
        ResourceError: The system refused.
    """
    with ShardWriter(out, [("nll", "F64", result.nll.shape)]) as writer:
        writer.write("nll", result.nll)


def _subject(
    folder: Path, config: K3Config, *, text: Path | None, tokens: Path | None
) -> tuple[Subject, tuple[Ids, ...]]:
    tokenizer: Tokenizer | None = None
    if text is not None or (folder / RANKS_FILE).exists():
        tokenizer = Tokenizer.load(folder)
    if text is not None:
        assert tokenizer is not None
        documents, label = encode_text(text, tokenizer), text.name
    else:
        assert tokens is not None
        documents, label = read_documents(tokens), tokens.name
    check_ids(documents, vocab_size=config.vocab_size, label=label)
    if all(len(ids) < 2 for ids in documents):
        got = sum(len(ids) for ids in documents)
        raise IncompleteError(
            f"{label}: nothing to score: expected a document of at least 2 ids, got {got} ids in "
            f"{len(documents)} documents",
            hint="the first id of a document is never scored",
        )
    subject = Subject(
        label=str(folder),
        config=config,
        tokens_sha256=digest_ids(documents),
        tokenizer_sha256=tokenizer.digest if tokenizer else None,
    )
    return subject, documents


def _plan(documents: Sequence[Ids], config: K3Config, settings: EvalSettings) -> list[Window]:
    if settings.bos and config.bos_token_id is None:
        raise UsageError("bos: expected a bos_token_id in config.json, got none")
    limit = config.max_position_embeddings
    if limit is not None and settings.ctx + settings.bos > limit:
        raise UsageError(f"ctx: expected at most {limit - settings.bos}, got {settings.ctx}")
    bos = config.bos_token_id if settings.bos else None
    return list(plan_windows(documents, ctx=settings.ctx, stride=settings.step, bos=bos))


def _score(
    model: Model,
    meter: DivergenceMeter | None,
    windows: Sequence[Window],
    settings: EvalSettings,
    progress: Progress,
) -> npt.NDArray[np.float64]:
    passes = list(
        plan_passes(
            windows,
            model.config,
            ram_bytes=settings.pass_bytes,
            ahead_bytes=settings.ahead_bytes,
            walks=1 if meter is None else 2,
        )
    )
    walks = len(passes) * (1 if meter is None else 2)
    progress.start("eval", walks * model.config.num_hidden_layers, "layers")
    parts: list[Tensor] = []
    for together in passes:
        if meter is not None:
            parts.append(meter.measure(together, progress=progress))
            continue
        residual = run_layers(model, [window.inputs for window in together], progress=progress)
        rows, targets = scored_rows(together)
        hidden = finish(model, residual, rows=rows)
        nll = negative_log_likelihood(hidden, targets, model.head_blocks())
        check_finite(nll, model, None, "lm_head")
        parts.append(nll)
    return torch.cat(parts).numpy()
