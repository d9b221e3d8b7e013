"""Runs a repack into a folder of its own: shards, sidecars, indexes, each whole or not at all.

A run that was cut short goes on with the same command: finished outputs are recorded and skipped.
The overall index is the last file to appear.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from k3quant.checkpoint.copy import CopyWay, link_file
from k3quant.checkpoint.journal import Job, Journal, open_journal, read_journal, stamp_source
from k3quant.checkpoint.output_file import (
    PARTIAL_SUFFIX,
    WrittenFile,
    free_bytes,
    preflight_space,
    write_error,
)
from k3quant.checkpoint.shard_pool import Advance, write_shards
from k3quant.checkpoint.shards import ShardFile
from k3quant.errors import RefusedError, UsageError
from k3quant.progress import SILENT, Progress
from k3quant.repack.copying import ShardCopier
from k3quant.repack.finish import outputs_of, write_last
from k3quant.repack.in_place import repack_in_place
from k3quant.repack.plan import RepackPlan, plan_repack
from k3quant.repack.settings import RepackSettings
from k3quant.report import Report

FreeBytes = Callable[[Path], int]


def run_repack(
    source: Path,
    out: Path,
    settings: RepackSettings,
    progress: Progress = SILENT,
    *,
    jobs: int = 2,
    free: FreeBytes = free_bytes,
) -> Report:
    """Repack a checkpoint, or go on where a run of the same command was cut short.

    Args:
        source: The checkpoint's folder.
        out: The output folder: new, empty, or that of the run to resume; with `in_place` the
            source's.
        settings: What is asked for.
        progress: Told the bytes written.
        jobs: Outputs written at a time; in place it is one.
        free: Tells the free bytes of a folder.

    Returns:
        The plan's warnings and numbers, with every output's size and digest.

    Raises:
        UsageError: The folders do not fit the settings, or the cut does not fit the model.
        IncompleteError: The source lacks files.
        StructureError: Its headers or its index are malformed or disagree.
        SchemaError: Its config is not one that the layout or the cut needs.
        ResourceError: The disk is full, or the system refused.
        RefusedError: The output folder holds something else, or the source changed meanwhile.
    """
    start = perf_counter()
    _check_folders(source, out, settings)
    try:
        if settings.in_place:
            plan, results = repack_in_place(source, settings, progress, free=free)
        else:
            plan = plan_repack(source, settings)
            results = _run(plan, source, out, progress, free, jobs)
    except OSError as error:
        raise write_error(out, error, need=0) from error
    seconds = perf_counter() - start
    return replace(
        plan.report(),
        summary=plan.summary() | {"out": str(out), "seconds": round(seconds, 3)} | results,
    )


def _check_folders(source: Path, out: Path, settings: RepackSettings) -> None:
    origin, target = source.resolve(), out.resolve()
    if settings.in_place:
        if origin != target:
            raise UsageError(
                f"{out}: expected the source's folder for work in place, got another one",
                hint="leave out `--out` or `--in-place`",
            )
    elif target == origin or origin in target.parents or target in origin.parents:
        raise UsageError(
            f"{out}: expected an output folder outside the source, got one that overlaps it",
            hint="name another folder, or work `--in-place`",
        )


def _run(
    plan: RepackPlan, source: Path, out: Path, progress: Progress, free: FreeBytes, jobs: int
) -> dict[str, Any]:
    stamps = stamp_source(plan.checkpoint)
    job = Job(command="repack", parameters=plan.settings.parameters(), source=stamps)
    state = read_journal(out)
    if state is None:
        _preflight(plan, out, {}, free)
    with open_journal(out, job) as journal:
        if not journal.complete:
            if state is not None:
                _remove_partials(plan, out)
                _preflight(plan, out, journal.finished, free)
            ways = _write_all(plan, source, out, journal, progress, jobs)
            if stamp_source(plan.checkpoint) != stamps:
                raise RefusedError(
                    f"{source}: expected the source to stay as it was, got a change meanwhile",
                    hint=f"remove {out} and run again",
                )
            write_last(plan, out, journal)
        else:
            ways = {}
        return {
            "resumed_files": len(state.finished) if state else 0,
            "copied_by": ways,
            "outputs": outputs_of(journal),
        }


def _write_all(
    plan: RepackPlan, source: Path, out: Path, journal: Journal, progress: Progress, jobs: int
) -> dict[str, int]:
    progress.start("repack", plan.bytes_to_copy, "B")
    ways: list[Mapping[CopyWay, int]] = []

    def write(shard: ShardFile, advance: Advance) -> None:
        progress.note(shard.file)
        size = plan.sizes[shard.file]
        if shard.file in journal.finished:
            advance(0 if shard.file in plan.linked else size)
            return
        path = out / shard.file
        path.parent.mkdir(parents=True, exist_ok=True)
        if origin := plan.linked.get(shard.file):
            link_file(source / origin, path)
            written = WrittenFile(file=shard.file, size=size, sha256="")
        else:
            with ShardCopier(lambda file: source / file, advance) as copier:
                written = copier.write_shard(path, plan.header(shard))
            ways.append(copier.copied)
        journal.record(replace(written, file=shard.file))

    write_shards(write, plan.shards.files, jobs=jobs, advance=progress.advance)
    with ShardCopier(lambda file: source / file, SILENT.advance) as copier:
        for file in plan.sidecars.copied:
            copier.copy_file(file, out / file)
    total = {str(way): sum(copied[way] for copied in ways) for way in CopyWay}
    return {way: count for way, count in total.items() if count}


def _preflight(
    plan: RepackPlan, out: Path, finished: Mapping[str, object], free: FreeBytes
) -> None:
    files = plan.checkpoint.source.files
    need = sum(
        size
        for file, size in plan.sizes.items()
        if file not in finished and file not in plan.linked
    )
    need += sum(files[file].size for file in plan.sidecars.copied) + plan.index_bytes
    hint = "" if plan.settings.link else "`--link` needs no space for shards that stay whole"
    preflight_space(out, need, free=free, hint=hint)


def _remove_partials(plan: RepackPlan, out: Path) -> None:
    for shard in plan.shards.files:
        (out / f"{shard.file}{PARTIAL_SUFFIX}").unlink(missing_ok=True)
