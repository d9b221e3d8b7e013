"""Perplexity of a checkpoint, evaluated layer by layer on one machine.

The mean is over all scored tokens, whatever windows and documents they come from.
"""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from k3quant.checkpoint.journal import Job, stamp_source
from k3quant.checkpoint.reader import Checkpoint, open_checkpoint
from k3quant.errors import UsageError
from k3quant.eval.checkpoint_model import CheckpointModel
from k3quant.eval.device_model import DeviceModel
from k3quant.eval.divergence import Divergence, Subject, check_comparable, summarize
from k3quant.eval.hidden_file import HiddenWriter
from k3quant.eval.inputs import read_subject, windows_of
from k3quant.eval.layer_meter import LayerMeter
from k3quant.eval.lockstep import CANDIDATE, REFERENCE, TWIN, Walker
from k3quant.eval.memory import plan_passes
from k3quant.eval.noise_floor import OtherOrder
from k3quant.eval.passes import PassRunner
from k3quant.eval.result import EvalResult
from k3quant.eval.settings import EvalSettings
from k3quant.eval.walk_state import open_state
from k3quant.eval.windows import Ids, Window
from k3quant.progress import SILENT, Progress

OpenModel = CheckpointModel | DeviceModel
DEVICE_READ_THREADS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A checkpoint with what it is to score.

    Attributes:
        checkpoint: The opened checkpoint.
        model: Its model.
        subject: What a comparison must agree on.
        documents: The ids.
    """

    checkpoint: Checkpoint
    model: OpenModel
    subject: Subject
    documents: tuple[Ids, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(entry.length for entry in self.checkpoint.entries.values())

    @property
    def name(self) -> str:
        """Name of its folder."""
        return Path(self.checkpoint.source.label).resolve().name

    @property
    def digest(self) -> str:
        """Sha256 of its config and its shards' headers."""
        stamps = stamp_source(self.checkpoint)
        facts = {file: [stamp.size, stamp.header_sha256] for file, stamp in stamps.items()}
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def evaluate(
    checkpoint: Path,
    *,
    text: Path | None = None,
    tokens: Path | None = None,
    reference: Path | None = None,
    settings: EvalSettings | None = None,
    state: Path | None = None,
    save_hidden: Path | None = None,
    progress: Progress = SILENT,
) -> EvalResult:
    """Score a text or token ids with a checkpoint, and with a reference beside it if asked.

    Args:
        checkpoint: Folder of the checkpoint.
        text: A text, encoded with the checkpoint's own tokenizer.
        tokens: A file of ids instead, see `read_documents`.
        reference: Folder of a checkpoint to compare with, walked in lockstep on the same ids.
        settings: How; None takes the defaults.
        state: Folder that keeps what is done after each layer; the same call goes on from there.
        save_hidden: File for what lm_head reads of the scored ids, see `hidden_file`.
        progress: Is told about each layer.

    Returns:
        The result.

    Raises:
        UsageError: Both or neither of text and ids, or options the config does not allow.
        IncompleteError: Nothing to score, or something is missing or short.
        SchemaError: Config, tensors or ids do not agree.
        ValuesError: A value is NaN or infinite; names the first layer and the tensor.
        RefusedError: The reference is of another vocabulary, tokenizer or shape, or the state is
            of another evaluation.
        ResourceError: A read or write failed, or the memory budget is too small.
    """
    started = time.perf_counter()
    settings = settings or EvalSettings()
    if (text is None) == (tokens is None):
        raise UsageError("eval: expected one of a text and a file of ids")
    if settings.noise_floor and reference is None:
        raise UsageError("noise floor: expected a reference to walk a second time, got none")
    folders = {CANDIDATE: checkpoint} | ({REFERENCE: reference} if reference is not None else {})
    share = len(folders) + settings.noise_floor
    sides = {
        name: _open_side(folder, settings, share=share, text=text, tokens=tokens)
        for name, folder in folders.items()
    }
    ours, theirs = sides[CANDIDATE], sides.get(REFERENCE)
    if theirs is not None:
        check_comparable(ours.subject, theirs.subject)
    walkers = _walkers(sides, settings, share=share)
    windows = windows_of(ours.documents, ours.subject.config, settings)
    passes = list(
        plan_passes(
            windows,
            ours.subject.config,
            ram_bytes=settings.pass_bytes,
            ahead_bytes=settings.ahead_bytes,
            walks=len(walkers),
            streams=sum(walker.copies for walker in walkers.values()),
        )
    )
    meter = None if theirs is None else _meter(ours.model, theirs.model)
    progress.start(
        "eval", len(passes) * len(walkers) * ours.subject.config.num_hidden_layers, "layers"
    )
    with ExitStack() as stack:
        runner = PassRunner(walkers=walkers, meter=meter, progress=progress)
        if state is not None:
            job = _job(sides, settings, save_hidden=save_hidden is not None)
            runner.state = stack.enter_context(open_state(state, job))
        if save_hidden is not None:
            runner.hidden = stack.enter_context(
                _hidden_writer(save_hidden, ours, windows, settings)
            )
        found = [runner.run(number, together) for number, together in enumerate(passes)]
    scores = {name: torch.cat([part[name] for part in found]) for name in found[0]}
    divergence: Divergence | None = None
    if theirs is not None and meter is not None:
        divergence = summarize(
            scores, meter, reference=theirs.name, reference_bytes=theirs.num_bytes
        )
    return EvalResult(
        settings=settings,
        nll=scores["nll"].numpy(),
        documents=len(ours.documents),
        windows=len(windows),
        tokens_sha256=ours.subject.tokens_sha256,
        tokenizer_sha256=ours.subject.tokenizer_sha256,
        seconds=time.perf_counter() - started,
        bytes_read=sum(walker.model.bytes_read for walker in walkers.values()),
        checkpoint=ours.name,
        checkpoint_bytes=ours.num_bytes,
        resumed_after=runner.resumed_after,
        divergence=divergence,
    )


def open_model(checkpoint: Checkpoint, settings: EvalSettings, *, share: int = 1) -> OpenModel:
    """Return a checkpoint as a model; `share` walks divide budgets and what is read ahead."""
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


def _open_side(
    folder: Path, settings: EvalSettings, *, share: int, text: Path | None, tokens: Path | None
) -> Side:
    checkpoint = open_checkpoint(folder)
    model = open_model(checkpoint, settings, share=share)
    subject, documents = read_subject(folder, model.config, text=text, tokens=tokens)
    return Side(checkpoint=checkpoint, model=model, subject=subject, documents=documents)


def _walkers(sides: Mapping[str, Side], settings: EvalSettings, *, share: int) -> dict[str, Walker]:
    ours, theirs = sides[CANDIDATE], sides.get(REFERENCE)
    if theirs is None:
        return {CANDIDATE: Walker(model=ours.model)}
    copies = 2 if settings.teacher_forced else 1
    walkers = {
        CANDIDATE: Walker(model=ours.model, copies=copies, watched=True),
        REFERENCE: Walker(model=theirs.model, watched=True),
    }
    if settings.noise_floor:
        twin = open_model(theirs.checkpoint, settings, share=share)
        walkers[TWIN] = Walker(model=twin, around=OtherOrder)
    return walkers


def _meter(ours: OpenModel, theirs: OpenModel) -> LayerMeter:
    return LayerMeter(
        num_layers=theirs.config.num_hidden_layers,
        reference_experts=theirs.config.moe.num_experts,
        candidate_experts=ours.config.moe.num_experts,
    )


def _job(sides: Mapping[str, Side], settings: EvalSettings, *, save_hidden: bool) -> Job:
    """Return all that decides the numbers: options, ids, files, version."""
    options = asdict(settings)
    for indifferent in ("ahead_bytes", "read_threads"):
        del options[indifferent]
    return Job(
        command="eval",
        parameters=options
        | {"tokens_sha256": sides[CANDIDATE].subject.tokens_sha256, "save_hidden": save_hidden},
        source={
            f"{name}/{file}": stamp
            for name, side in sides.items()
            for file, stamp in stamp_source(side.checkpoint).items()
        },
    )


def _hidden_writer(
    path: Path, side: Side, windows: Sequence[Window], settings: EvalSettings
) -> HiddenWriter:
    return HiddenWriter(
        path,
        rows=sum(len(window.targets) for window in windows),
        width=side.model.config.hidden_size,
        dtype=side.model.dtype,
        facts={
            "checkpoint": side.name,
            "checkpoint_sha256": side.digest,
            "tokens_sha256": side.subject.tokens_sha256,
            "context": str(settings.ctx),
            "stride": str(settings.step),
            "bos": str(settings.bos),
            "dtype": settings.dtype,
        },
    )
