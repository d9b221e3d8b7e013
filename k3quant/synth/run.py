"""Writes a synthetic checkpoint: true headers from the table, and holes or seeded values.

A hole reads as zeros and takes no room: the whole of Kimi-K3 fits into its headers and index.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from k3quant.checkpoint.header import encode_header
from k3quant.checkpoint.index import INDEX_FILE, encode_index
from k3quant.checkpoint.journal import Job, Journal, open_journal, read_journal
from k3quant.checkpoint.output_file import (
    PARTIAL_SUFFIX,
    WrittenFile,
    atomic_write,
    free_bytes,
    preflight_space,
    sync_folder,
    write_all,
    write_error,
)
from k3quant.checkpoint.reader import CONFIG_FILE
from k3quant.checkpoint.shard_pool import Advance, write_shards
from k3quant.checkpoint.writer import ShardWriter
from k3quant.errors import UsageError
from k3quant.models.k3_config import K3Config, read_config
from k3quant.models.k3_tensors import num_shards, shard_name, shard_tensors
from k3quant.progress import SILENT, Progress
from k3quant.repack.cut import CUT_FILE, Cut, CutTensor, cut_tensors, plan_cut
from k3quant.repack.settings import Span
from k3quant.report import Report
from k3quant.synth.stream import Stream
from k3quant.synth.values import Values, values_of

README_FILE = "README.md"
_CHUNK_ELEMENTS = 1 << 19
_DEVICE_CHUNK_ELEMENTS = 1 << 23
_README = """\
# Synthetic Kimi-K3 checkpoint

Written by `k3quant synth`: the headers, names and shapes of its config are true, the values are
{values}. It has no tokenizer and computes nothing of use.
"""


Fill = Callable[[Values, Stream, int, int], npt.NDArray[np.uint8]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shard:
    """One file to write: its size and the bytes of its tensors."""

    file: str
    tensors: list[CutTensor]
    file_bytes: int
    tensor_bytes: int


def synth(
    config: Mapping[str, Any],
    out: Path,
    *,
    sparse: bool,
    seed: int = 0,
    layers: Span | None = None,
    experts: Span | None = None,
    device: str = "cpu",
    jobs: int = 2,
    progress: Progress = SILENT,
    free: Callable[[Path], int] = free_bytes,
) -> Report:
    """Write a checkpoint of a config, or go on where a run of the same command was cut short.

    A tensor's values depend on the seed and its name in the whole model alone, so that a cut holds
    the same tensors as a repack's cut of the whole.

    Args:
        config: The config.json to write a checkpoint of.
        out: The output folder, new or empty.
        sparse: Write holes instead of values.
        seed: Seed of the values.
        layers: First and last decoder layer of a cut, None for all.
        experts: First and last routed expert of a cut, None for all.
        device: Where values are made, `cpu` or `cuda`; they are the same.
        jobs: Shards written at a time.
        progress: Told the bytes written.
        free: Tells the free bytes of a folder.

    Raises:
        SchemaError: The config is not Kimi-K3's.
        UsageError: The cut does not fit the model, or the device is another one.
        RefusedError: The output folder holds something else.
        ResourceError: The disk is full, the system refused, or there is no such device.
    """
    start = perf_counter()
    fill, chunk = _maker(device)
    source = read_config(config)
    cut = None
    if layers is not None or experts is not None:
        cut = plan_cut(config, layers=layers, experts=experts)
    shards = list(_shards(source, cut))
    job = Job(
        command="synth",
        parameters={
            "config_sha256": hashlib.sha256(_json(dict(config))).hexdigest(),
            "sparse": sparse,
            "seed": seed,
            "layers": layers,
            "experts": experts,
        },
        source={},
    )
    if not sparse:
        state = read_journal(out)
        done = state.finished if state else {}
        need = sum(shard.file_bytes for shard in shards if shard.file not in done)
        preflight_space(out, need, free=free, hint="`--sparse` writes holes instead of values")
    file_bytes = sum(shard.file_bytes for shard in shards)
    progress.start("synth", file_bytes, "B")
    with open_journal(out, job) as journal:
        work = _Work(source, seed, sparse, journal, progress, fill, chunk)
        largest_first = sorted(shards, key=lambda shard: -shard.file_bytes)
        write_shards(work.write, largest_first, jobs=jobs, advance=progress.advance)
        _write_rest(out, shards, dict(config), cut, sparse=sparse)
        journal.mark_complete()
    return Report(
        command="synth",
        summary={
            "out": str(out),
            "sparse": sparse,
            "seed": None if sparse else seed,
            "tensors": sum(len(shard.tensors) for shard in shards),
            "tensor_bytes": sum(shard.tensor_bytes for shard in shards),
            "files": len(shards),
            "file_bytes": file_bytes,
            "seconds": round(perf_counter() - start, 3),
        },
    )


@dataclass(frozen=True, slots=True)
class _Work:
    """What writing any shard needs."""

    source: K3Config
    seed: int
    sparse: bool
    journal: Journal
    progress: Progress
    fill: Fill
    chunk_elements: int

    def write(self, shard: _Shard, advance: Advance) -> None:
        self.progress.note(shard.file)
        path = self.journal.folder / shard.file
        if shard.file in self.journal.finished:
            advance(shard.file_bytes)
        elif self.sparse:
            self.journal.record(_write_holes(path, shard))
            advance(shard.file_bytes)
        else:
            self.journal.record(self._write_values(path, shard, advance))

    def _write_values(self, path: Path, shard: _Shard, advance: Advance) -> WrittenFile:
        tensors = {tensor.result.name: tensor for tensor in shard.tensors}
        with ShardWriter(path, _entries(shard.tensors), digest=False) as writer:
            advance(writer.data_start)
            for name, place in writer.places.items():
                for offset, piece in self._pieces(tensors[name], place.end - place.begin):
                    writer.write_at(name, offset, piece)
                    advance(len(piece))
        return writer.written

    def _pieces(self, tensor: CutTensor, length: int) -> Iterator[tuple[int, memoryview]]:
        """Yield a tensor's bytes piece by piece, each with its offset."""
        spec, result, first_row = tensor
        count = math.prod(result.shape)
        row = count // result.shape[0]
        values, stream = values_of(spec, self.source), Stream.of(self.seed, spec.name)
        item_bytes = length // count
        for begin in range(0, count, self.chunk_elements):
            number = min(self.chunk_elements, count - begin)
            piece = self.fill(values, stream, first_row * row + begin, number)
            yield begin * item_bytes, piece.data


def _maker(device: str) -> tuple[Fill, int]:
    """Return what makes values, and how many it makes at a time."""
    if device == "cpu":
        return Values.fill, _CHUNK_ELEMENTS
    if device != "cuda":
        raise UsageError(f"device: expected `cpu` or `cuda`, got `{device}`")
    import torch

    from k3quant.synth.on_device import DeviceValues

    return DeviceValues(torch.device(device)).fill, _DEVICE_CHUNK_ELEMENTS


def _shards(source: K3Config, cut: Cut | None) -> Iterator[_Shard]:
    if cut is None:
        for number in range(1, num_shards(source) + 1):
            specs = shard_tensors(source, number)
            yield _shard(shard_name(source, number), [CutTensor(spec, spec, 0) for spec in specs])
        return
    by_shard: dict[int, list[CutTensor]] = {}
    for tensor in cut_tensors(cut):
        by_shard.setdefault(tensor.result.shard, []).append(tensor)
    for number, tensors in by_shard.items():
        yield _shard(shard_name(cut.result, number), tensors)


def _shard(file: str, tensors: list[CutTensor]) -> _Shard:
    header, places = encode_header(_entries(tensors))
    payload = max(place.end for place in places.values())
    return _Shard(
        file=file, tensors=tensors, file_bytes=len(header) + payload, tensor_bytes=payload
    )


def _entries(tensors: list[CutTensor]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(t.result.name, t.result.dtype, t.result.shape) for t in tensors]


def _write_holes(path: Path, shard: _Shard) -> WrittenFile:
    header, _ = encode_header(_entries(shard.tensors))
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    try:
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            write_all(fd, 0, memoryview(header))
            os.ftruncate(fd, shard.file_bytes)
            os.fsync(fd)
        finally:
            os.close(fd)
        partial.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise write_error(path, error, need=len(header)) from error
    return WrittenFile(file=path.name, size=shard.file_bytes, sha256="")


def _write_rest(
    out: Path, shards: list[_Shard], config: dict[str, Any], cut: Cut | None, *, sparse: bool
) -> None:
    weight_map = {t.result.name: shard.file for shard in shards for t in shard.tensors}
    total = sum(shard.tensor_bytes for shard in shards)
    atomic_write(out / CONFIG_FILE, _json(config if cut is None else cut.config))
    values = "holes that read as zeros" if sparse else "seeded noise"
    atomic_write(out / README_FILE, _README.format(values=values).encode())
    if cut is not None:
        atomic_write(out / CUT_FILE, _json(cut.record("synthetic", None)))
    atomic_write(out / INDEX_FILE, encode_index(weight_map, total))


def _json(document: dict[str, Any]) -> bytes:
    # Without a final newline, as the release's config.json is.
    return json.dumps(document, indent=2, ensure_ascii=False).encode()
