"""Intermediate tensors of one prefill, for people who port the model.

Names and shapes are those of `trace_entries`. Each tensor goes to the file as it comes; logits go
a block of the vocabulary at a time.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from k3quant.checkpoint.reader import open_checkpoint
from k3quant.checkpoint.writer import ShardWriter, WrittenFile, preflight_space
from k3quant.errors import IncompleteError, UsageError
from k3quant.eval.executor import finish, run_layers
from k3quant.eval.head import LogSumExp, TargetLogits, logit_blocks
from k3quant.eval.perplexity import open_model
from k3quant.eval.settings import EvalSettings
from k3quant.eval.source import Model
from k3quant.eval.tokens import check_ids, read_documents
from k3quant.eval.trace_table import trace_entries
from k3quant.eval.windows import Ids
from k3quant.formats.dtypes import DTYPES, torch_dtype
from k3quant.progress import SILENT, Progress

MAX_TOKENS = 4096  # one window is traced whole, and K3 leaves some 60 MB a token


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSettings:
    """What to trace.

    Attributes:
        layers: 0-based layers whose intermediates are kept; None is all. The end of the model is
            always kept.
        evaluation: Dtype, reading and device.
    """

    layers: Collection[int] | None = None
    evaluation: EvalSettings = field(default_factory=EvalSettings)


def trace(
    checkpoint: Path,
    tokens: Path,
    out: Path,
    *,
    settings: TraceSettings | None = None,
    progress: Progress = SILENT,
) -> WrittenFile:
    """Run one prefill and write its intermediate tensors.

    Args:
        checkpoint: Folder of the checkpoint.
        tokens: A file with one list of ids, see `read_documents`; no BOS is added.
        out: The safetensors file to write.
        settings: What to keep; None keeps all.
        progress: Is told about each layer.

    Returns:
        Name, size and digest of the written file.

    Raises:
        UsageError: Several lists of ids, too many ids, or a layer that does not exist.
        IncompleteError: No ids, or something is missing or short.
        SchemaError: Config, tensors or ids do not agree.
        ValuesError: A value is NaN or infinite.
        ResourceError: The disk is too small, or a read or write failed.
    """
    settings = settings or TraceSettings()
    model = open_model(open_checkpoint(checkpoint), settings.evaluation)
    ids = _one_document(tokens, vocab_size=model.config.vocab_size)
    kept = _kept_layers(settings.layers, model.config.num_hidden_layers)
    entries = [
        entry for entry in trace_entries(model.config, len(ids)) if _layer_of(entry[0]) in kept
    ]
    need = sum(DTYPES[dtype].byte_count(math.prod(shape)) for _, dtype, shape in entries)
    preflight_space(out.parent, need, hint="trace fewer layers or fewer ids")
    progress.start("trace", model.config.num_hidden_layers, "layers")
    with ShardWriter(out, entries) as writer:
        sink = _Sink(writer, {name: dtype for name, dtype, _ in entries})
        _run(model, ids, sink, progress)
    return writer.written


class _Sink:
    """Writes what a trace keeps and drops the rest."""

    def __init__(self, writer: ShardWriter, dtypes: dict[str, str]) -> None:
        self._writer = writer
        self._dtypes = dtypes

    def write(self, name: str, value: Tensor) -> None:
        dtype = self._dtypes.get(name)
        if dtype is not None:
            kept = value.to(torch_dtype(dtype)).contiguous().cpu()
            self._writer.write(name, kept.numpy())

    def write_columns(self, name: str, rows: slice, first: int, total: int, value: Tensor) -> None:
        """Write `[rows, columns]` float32 of a tensor with `total` columns."""
        block = value.cpu().contiguous().numpy()
        for number, row in enumerate(block, start=rows.start):
            self._writer.write_at(name, (number * total + first) * row.itemsize, row)


def _run(model: Model, ids: Ids, sink: _Sink, progress: Progress) -> None:
    sink.write("input_ids", torch.from_numpy(ids))
    residual = run_layers(model, [ids], tap=sink.write, progress=progress)
    if residual.blocks:
        sink.write("block_residual", torch.stack(residual.blocks, dim=1))
    hidden = finish(model, residual, tap=sink.write)
    targets = torch.from_numpy(np.append(ids[1:], 0)).to(hidden.device)
    sums, chosen = LogSumExp(len(ids), hidden.device), TargetLogits(targets)
    for first, weight in model.head_blocks():
        for rows, logits in logit_blocks(hidden, weight):
            sink.write_columns("logits", rows, first, model.config.vocab_size, logits)
            sums.add(rows, logits)
            chosen.add(rows, logits, first)
    sink.write("nll", (sums.value() - chosen.values)[:-1])


def _one_document(path: Path, *, vocab_size: int) -> Ids:
    documents = read_documents(path)
    check_ids(documents, vocab_size=vocab_size, label=path.name)
    if len(documents) != 1:
        raise UsageError(
            f"{path.name}: expected one list of ids, got {len(documents)}",
            hint="a trace is of one prefill",
        )
    (ids,) = documents
    if len(ids) == 0:
        raise IncompleteError(f"{path.name}: expected at least 1 id, got none")
    if len(ids) > MAX_TOKENS:
        raise UsageError(f"{path.name}: expected at most {MAX_TOKENS} ids, got {len(ids)}")
    return ids


def _kept_layers(layers: Collection[int] | None, num_layers: int) -> set[int | None]:
    """Return the layers to keep; None among them stands for tensors of no layer."""
    for layer in layers or ():
        if not 0 <= layer < num_layers:
            raise UsageError(f"layers: expected 0 to {num_layers - 1}, got {layer}")
    return {None, *(range(num_layers) if layers is None else layers)}


def _layer_of(name: str) -> int | None:
    first, _, rest = name.partition(".")
    return int(rest.partition(".")[0]) if first == "layers" else None
