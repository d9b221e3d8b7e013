"""Running an export: files in parallel, units in order, every byte read back, resumable.

An output appears under its name only when it is whole and on the disk; the journal then knows it,
so that a killed run goes on with the next file. Config, proof and index come last.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock
from typing import Any, TypeVar

import numpy as np

from k3quant import __version__
from k3quant.checkpoint.folder import LocalFolder
from k3quant.checkpoint.index import INDEX_FILE
from k3quant.checkpoint.journal import Job, Journal, open_journal, stamp_source
from k3quant.checkpoint.output_file import (
    Buffer,
    OutputFile,
    WrittenFile,
    atomic_write,
    byte_view,
    preflight_space,
)
from k3quant.checkpoint.reader import Checkpoint
from k3quant.convert.buffers import scratch
from k3quant.convert.card import CARD_FILE, encode_card
from k3quant.convert.export_plan import ExportPlan, FilePlan, Unit, unit_bytes
from k3quant.convert.proof import PROOF_FILE, WeightProof, encode_proof, summarize
from k3quant.convert.supply import AllThere, Supply
from k3quant.errors import RefusedError, ResourceError
from k3quant.progress import SILENT, Progress
from k3quant.verify.stream import default_jobs, hash_file

_COPY_BYTES = 1 << 20
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertSettings:
    """Settings of one run.

    Attributes:
        parameters: What decides the output's bytes, as JSON values; a resumed run must agree.
        require_lossless: Stop before the first weight whose values would change is published.
        jobs: Files written at once; None takes the processors.
        hash_source: Whether the proof states the digest of every source shard.
    """

    parameters: Mapping[str, Any]
    require_lossless: bool = False
    jobs: int | None = None
    hash_source: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertResult:
    """What was written.

    Attributes:
        files: Weight files with their digests.
        resumed: How many of them an earlier run had written.
        summary: The proof's sums, by family and format.
        exact: Whether every weight kept its values.
    """

    files: tuple[WrittenFile, ...]
    resumed: int
    summary: dict[str, dict[str, Any]]
    exact: bool


def run_convert(
    checkpoint: Checkpoint,
    out: Path,
    plan: ExportPlan,
    settings: ConvertSettings,
    progress: Progress = SILENT,
    *,
    supply: Supply | None = None,
) -> ConvertResult:
    """Write an export.

    Args:
        checkpoint: The source.
        out: Output folder, empty or with the journal of the same job.
        plan: What to write.
        settings: How.
        progress: Told the source bytes that were converted.
        supply: Says when a file may begin; None for a source that is all there.

    Raises:
        RefusedError: The folder holds something else, or a weight would change under
            `require_lossless`.
        ValuesError: A value cannot be represented.
        ResourceError: The disk is full or failed, or does not return what was written.
    """
    _refuse_inside(checkpoint, out)
    job = Job(
        command="convert", parameters=dict(settings.parameters), source=stamp_source(checkpoint)
    )
    with open_journal(out, job) as journal:
        todo = [file for file in plan.files if file.name not in journal.finished]
        resumed = len(plan.files) - len(todo)
        preflight_space(out, sum(file.file_bytes for file in todo))
        progress.start("convert", sum(_source_bytes(checkpoint, file) for file in todo), "B")
        _write_files(checkpoint, out, todo, journal, settings, supply or AllThere(), progress)
        files = tuple(journal.finished[file.name].written for file in plan.files)
        proofs = [
            WeightProof.from_json(module, record)
            for file in plan.files
            for module, record in journal.finished[file.name].details["weights"].items()
        ]
        sources = {
            source: digest
            for file in plan.files
            for source, digest in journal.finished[file.name].details["sources"].items()
        }
        _write_beside(checkpoint, out, plan, settings, files, proofs, sources)
        journal.mark_complete()
    return ConvertResult(
        files=files,
        resumed=resumed,
        summary=summarize(proofs),
        exact=all(proof.exact for proof in proofs),
    )


def _write_files(
    checkpoint: Checkpoint,
    out: Path,
    todo: list[FilePlan],
    journal: Journal,
    settings: ConvertSettings,
    supply: Supply,
    progress: Progress,
) -> None:
    failed = Event()
    digests = _SourceDigests(checkpoint, supply, wanted=settings.hash_source)

    def write(plan: FilePlan) -> None:
        if failed.is_set():
            return
        try:
            progress.note(plan.name)
            written, proofs, sources = _write_file(
                checkpoint, out, plan, settings, workers, digests, failed, progress
            )
            weights = {proof.module: proof.to_json() for proof in proofs}
            journal.record(written, details={"weights": weights, "sources": sources})
            supply.finished(plan)
        except BaseException:
            failed.set()  # the other files stop at their next unit
            raise

    # Units of one file run beside each other; files overlap where one waits for its digest or the
    # disk. Units queue in order, so that the digest follows close behind.
    jobs = settings.jobs or default_jobs()
    with ThreadPoolExecutor(jobs) as workers, ThreadPoolExecutor(jobs) as pool:
        futures: list[Future[None]] = []
        try:
            futures += (pool.submit(write, plan) for plan in supply.in_turn(todo, failed))
            wait(futures)  # after a fault the others stop at their next unit
            _results(futures)
        except BaseException:
            failed.set()  # an interrupt, too, ends the files that are open
            raise


class _Stopped(Exception):  # noqa: N818
    """Another unit failed; this one is given up without a fault of its own."""


def _results(futures: Iterable[Future[T]]) -> list[T]:
    """Return the results of finished work, or raise what made it stop."""
    finished = list(futures)
    for future in finished:
        fault = future.exception()
        if fault is not None and not isinstance(fault, _Stopped):
            raise fault
    return [future.result() for future in finished]


def _write_file(
    checkpoint: Checkpoint,
    out: Path,
    plan: FilePlan,
    settings: ConvertSettings,
    workers: ThreadPoolExecutor,
    digests: "_SourceDigests",
    failed: Event,
    progress: Progress,
) -> tuple[WrittenFile, list[WeightProof], dict[str, str | None]]:
    path = out / plan.name
    path.parent.mkdir(parents=True, exist_ok=True)
    with OutputFile(path, size=plan.file_bytes) as output:
        output.write_at(0, plan.header)
        _write_padding(output, plan)
        put = _proving_writer(output, plan)

        def run(unit: Unit) -> Sequence[WeightProof]:
            if failed.is_set():
                raise _Stopped
            try:
                made = unit.run(checkpoint, put)
                if settings.require_lossless:
                    _refuse_loss(made)
            except BaseException:
                failed.set()
                raise
            progress.advance(unit_bytes(checkpoint, unit))
            return made

        running = [workers.submit(run, unit) for unit in plan.units]
        try:
            sources = digests.of(plan)
        finally:
            wait(running)  # nothing may write into a file that was given up
        proofs = [proof for made in _results(running) for proof in made]
    return output.written, proofs, sources


def _proving_writer(output: OutputFile, plan: FilePlan) -> Callable[[str, int, Buffer], None]:
    """Return a writer that reads back what it wrote and compares it with what it was given."""

    def put(tensor: str, offset: int, buffer: Buffer) -> None:
        view = byte_view(buffer)
        begin, end = plan.places[tensor]
        if offset < 0 or begin + offset + len(view) > end:
            raise ValueError(f"{tensor}: expected a piece within {end - begin} bytes")
        output.write_at(begin + offset, view)
        given = np.frombuffer(view, np.uint8)
        for start in range(0, len(view), _COPY_BYTES):
            piece = given[start : start + _COPY_BYTES]
            found = scratch().array("read back", piece.shape, np.uint8)
            got = os.preadv(output.fd, [byte_view(found)], begin + offset + start)
            if got != len(piece) or not np.array_equal(found, piece):
                raise ResourceError(
                    f"{plan.name}: expected to read back what was written to {tensor}, got "
                    f"other bytes at {begin + offset + start}",
                    hint="the disk or its driver loses data",
                )

    return put


def _write_padding(output: OutputFile, plan: FilePlan) -> None:
    position = len(plan.header)
    for begin, end in sorted(plan.places.values()):
        if begin > position:
            output.write_at(position, bytes(begin - position))
        position = max(position, end)
    if position < plan.file_bytes:
        output.write_at(position, bytes(plan.file_bytes - position))


def _refuse_loss(proofs: Any) -> None:
    for proof in proofs:
        if not proof.exact:
            counts = proof.counts
            how = f"{counts.exact} of {counts.blocks} blocks exact" if counts else "values rounded"
            raise RefusedError(
                f"{proof.module}: expected a lossless {proof.target}, got {how}",
                hint="choose another format for it, or drop --require-lossless",
            )


def _source_bytes(checkpoint: Checkpoint, plan: FilePlan) -> int:
    return sum(unit_bytes(checkpoint, unit) for unit in plan.units)


class _SourceDigests:
    """The digest of each source shard, computed once however many files are made of it."""

    def __init__(self, checkpoint: Checkpoint, supply: Supply, *, wanted: bool) -> None:
        self._checkpoint = checkpoint
        self._supply = supply
        self._wanted = wanted
        self._known: dict[str, str] = {}
        self._locks: dict[str, Lock] = {file: Lock() for file in checkpoint.headers}

    def of(self, plan: FilePlan) -> dict[str, str | None]:
        """Return the digests of the shards that a file is made of, None where not wanted."""
        entry = self._checkpoint.entry
        files = {entry(name).file for unit in plan.units for name in unit.sources}
        return {file: self._digest(file) for file in sorted(files)}

    def _digest(self, file: str) -> str | None:
        if not self._wanted:
            return None
        with self._locks[file]:
            if file not in self._known:
                proven = self._supply.digest_of(file)
                self._known[file] = proven or hash_file(self._checkpoint.source, file)
        return self._known[file]


def _write_beside(
    checkpoint: Checkpoint,
    out: Path,
    plan: ExportPlan,
    settings: ConvertSettings,
    files: tuple[WrittenFile, ...],
    proofs: list[WeightProof],
    sources: Mapping[str, str | None],
) -> None:
    for name in plan.sidecars:
        size = checkpoint.source.files[name].size
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        with OutputFile(out / name, size=size) as output:
            for offset in range(0, size, _COPY_BYTES):
                piece = checkpoint.source.read(name, offset, min(_COPY_BYTES, size - offset))
                output.write_at(offset, piece)
    job = {
        "version": __version__,
        "target": plan.target,
        "scheme": plan.scheme,
        "parameters": dict(settings.parameters),
        "config_sha256": hashlib.sha256(plan.documents.get("config.json", b"")).hexdigest(),
    }
    proof = encode_proof(
        proofs,
        job=job,
        source_files=sources,
        output_files=files,
        skipped=plan.skipped,
        transforms=plan.transforms,
    )
    atomic_write(out / PROOF_FILE, proof)
    atomic_write(out / CARD_FILE, encode_card(plan, summarize(proofs)))
    last = INDEX_FILE
    for name in sorted(plan.documents, key=lambda name: (name == last, name)):
        atomic_write(out / name, plan.documents[name])


def _refuse_inside(checkpoint: Checkpoint, out: Path) -> None:
    if isinstance(checkpoint.source, LocalFolder):
        source = checkpoint.source.root.resolve()
        if out.resolve() == source or source in out.resolve().parents:
            raise RefusedError(
                f"{out}: expected a folder outside the source {source}, got one inside"
            )
