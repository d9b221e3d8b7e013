"""Repacks a checkpoint inside its own folder, with room for one output besides it.

Nothing of a source shard is given up before every tensor there is in an output that is synced,
read back from the disk equal byte for byte, and recorded. Then the tensors' blocks are freed and
at last the shard. At every moment each tensor is whole in a finished output or in the source.
"""

import os
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from k3quant.checkpoint.copy import link_file
from k3quant.checkpoint.folder import fill
from k3quant.checkpoint.journal import (
    JOURNAL_FILE,
    Job,
    Journal,
    JournalState,
    open_journal,
    read_journal,
    stamp_source,
)
from k3quant.checkpoint.output_file import WrittenFile, preflight_space, sync_folder
from k3quant.checkpoint.shards import ShardFile
from k3quant.errors import HashError, RefusedError
from k3quant.progress import Progress
from k3quant.repack.copying import ShardCopier
from k3quant.repack.finish import outputs_of, write_last
from k3quant.repack.holes import DoneRanges, can_punch, free_blocks, punch_hole
from k3quant.repack.plan import RepackPlan, plan_repack
from k3quant.repack.ranges import PlannedHeader
from k3quant.repack.set_aside import SetAside, begin_set_aside, end_set_aside, is_set_aside
from k3quant.repack.settings import RepackSettings
from k3quant.repack.sidecars import SET_ASIDE_FOLDER
from k3quant.report import Report
from k3quant.sizes import format_size

_COMPARE_BYTES = 4 << 20


def repack_in_place(
    folder: Path,
    settings: RepackSettings,
    progress: Progress,
    *,
    free: Callable[[Path], int],
) -> tuple[RepackPlan, dict[str, Any]]:
    """Repack a folder in place, or go on where a run was cut short.

    Args:
        folder: The checkpoint's folder.
        settings: What is asked for.
        progress: Told the bytes written.
        free: Tells the free bytes of a folder.

    Returns:
        The plan and what was done.

    Raises:
        HashError: An output read back differs from its source; the source is untouched.
        RefusedError: A shard has a second name, an output would replace another file, another job
            is unfinished, or the layout needs parts of files freed and the file system cannot.
        ResourceError: The disk is full, or the system refused.
    """
    state = read_journal(folder)
    ended = state is not None and state.complete
    if ended:
        _end(folder)
        state = None
    if is_set_aside(folder) and state is None:
        raise RefusedError(
            f"{folder}: expected {JOURNAL_FILE} of the work in place that began here, got none",
            hint=f"the shards not yet moved on lie in {SET_ASIDE_FOLDER}, partly freed",
        )
    job = _job(folder, settings, state, free)
    if ended:
        (folder / JOURNAL_FILE).unlink()
    with open_journal(folder, job, may_hold_files=True) as journal:
        if is_set_aside(folder):
            aside = SetAside(folder)
        else:
            aside = begin_set_aside(folder, plan_repack(folder, settings).checkpoint)
        aside.claim()
        plan = plan_repack(aside, settings)
        resumed = len(journal.finished)
        _move_all(plan, aside, journal, progress)
        write_last(plan, folder, journal)
        results = {"resumed_files": resumed, "outputs": outputs_of(journal)}
    _end(folder)
    (folder / JOURNAL_FILE).unlink()
    sync_folder(folder)
    return plan, results


def plan_in_place(folder: Path, settings: RepackSettings) -> Report:
    """Plan a repack in place without writing anything; `extra_bytes` is what it takes for a while.

    Raises:
        RefusedError: An output would replace another file, or the layout needs parts of files
            freed and the file system cannot.
        K3QuantError: As `plan_repack`.
    """
    plan = plan_repack(folder, settings)
    extra = _checked_space(plan, folder)
    return Report(
        command="repack", findings=plan.warnings, summary=plan.summary() | {"extra_bytes": extra}
    )


def extra_space(plan: RepackPlan, *, punch: bool, block: int) -> int:
    """Return the most bytes a repack in place takes beyond the source, shard after shard.

    Args:
        plan: The plan.
        punch: Whether the file system frees parts of a file.
        block: Its block size.
    """
    extra = peak = 0
    freed: Counter[str] = Counter()
    release = _Release(plan, block)
    for shard in plan.shards.files:
        origin = plan.linked.get(shard.file)
        extra += 0 if origin else plan.sizes[shard.file]
        peak = max(peak, extra)
        blocks, finished = release.after(shard, plan.header(shard))
        for file, begin, end in blocks if punch else ():
            freed[file] += end - begin
            extra -= end - begin
        for file in finished:
            if file != origin:
                extra -= plan.checkpoint.headers[file].file_bytes - freed[file]
    return peak


class _Release:
    """Tells after each output which blocks and which files of the source nobody needs now."""

    def __init__(self, plan: RepackPlan, block: int) -> None:
        self._plan = plan
        self._block = block
        self._left = Counter(entry.file for entry in plan.entries.values())
        self._done = {file: DoneRanges() for file in plan.checkpoint.headers}

    def after(
        self, shard: ShardFile, planned: PlannedHeader
    ) -> tuple[list[tuple[str, int, int]], list[str]]:
        """Return free blocks as file, begin and end, and the files that are done altogether."""
        self._left.subtract(self._plan.entries[item.name].file for item in shard.items)
        files = dict.fromkeys(self._plan.entries[item.name].file for item in shard.items)
        finished = [file for file in files if not self._left[file]]
        blocks = []
        for span in planned.ranges:
            begin, end = free_blocks(
                self._done[span.file], span.offset, span.offset + span.length, block=self._block
            )
            if begin < end and span.file not in finished:
                blocks.append((span.file, begin, end))
        return blocks, finished


def _job(
    folder: Path,
    settings: RepackSettings,
    state: JournalState | None,
    free: Callable[[Path], int],
) -> Job:
    parameters = settings.parameters()
    if state is not None:
        # The source is on its way elsewhere; what it was is in the record.
        return Job(command="repack", parameters=parameters, source=state.job.source)
    plan = plan_repack(folder, settings)
    preflight_space(folder, _checked_space(plan, folder), free=free)
    return Job(command="repack", parameters=parameters, source=stamp_source(plan.checkpoint))


def _checked_space(plan: RepackPlan, folder: Path) -> int:
    """Return the bytes that are needed beyond the source; refuse what cannot be done at all."""
    _refuse_collisions(plan, folder)
    punch = can_punch(folder)
    block = os.statvfs(folder).f_bsize
    extra = extra_space(plan, punch=punch, block=block)
    largest = max(plan.sizes.values(), default=0)
    headers = plan.checkpoint.headers.values()
    growth = sum(plan.sizes.values()) - sum(header.file_bytes for header in headers)
    if not punch and extra > largest + max(growth, 0):
        raise RefusedError(
            f"{folder}: expected a file system that frees parts of a file, got one that does not; "
            f"this layout would need {format_size(extra)} beside the source, an output is "
            f"{format_size(largest)}",
            hint="name an `--out` on a disk with room",
        )
    return extra


def _refuse_collisions(plan: RepackPlan, folder: Path) -> None:
    for shard in plan.shards.files:
        if shard.file not in plan.checkpoint.headers and (folder / shard.file).exists():
            raise RefusedError(
                f"{shard.file}: expected a name for an output, got a file that is no shard of the "
                "index",
                hint="move the file out of the folder",
            )


def _move_all(plan: RepackPlan, aside: SetAside, journal: Journal, progress: Progress) -> None:
    progress.start("repack", plan.bytes_to_copy, "B")
    release = _Release(plan, os.statvfs(aside.root).f_bsize)
    punch = can_punch(aside.root)
    with ShardCopier(aside.path, progress.advance) as copier:
        for shard in plan.shards.files:
            progress.note(shard.file)
            planned = plan.header(shard)
            if shard.file in journal.finished:
                progress.advance(0 if shard.file in plan.linked else plan.sizes[shard.file])
            else:
                written = _move(plan, shard, planned, aside, copier)
                journal.record(written)
            blocks, finished = release.after(shard, planned)
            for file in finished:
                copier.close(file)
                aside.path(file).unlink(missing_ok=True)
            if finished:
                sync_folder(aside.root / SET_ASIDE_FOLDER)
            if punch:
                _free(aside, blocks)


def _move(
    plan: RepackPlan,
    shard: ShardFile,
    planned: PlannedHeader,
    aside: SetAside,
    copier: ShardCopier,
) -> WrittenFile:
    path = aside.root / shard.file
    path.parent.mkdir(parents=True, exist_ok=True)
    if origin := plan.linked.get(shard.file):
        with suppress(RefusedError):  # where there are no links it is copied like the others
            link_file(aside.path(origin), path)
            return WrittenFile(file=shard.file, size=plan.sizes[shard.file], sha256="")
    written = copier.write_shard(path, planned)
    _read_back(path, planned, copier)
    return WrittenFile(file=shard.file, size=written.size, sha256=written.sha256)


def _read_back(path: Path, planned: PlannedHeader, copier: ShardCopier) -> None:
    """Read an output from the disk and compare it with its source.

    Raises:
        HashError: It differs; it is removed.
        ResourceError: The system refused a read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # It was synced, so that the page cache can forget it and the disk has to answer.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        header = bytearray(len(planned.header))
        fill(fd, path.name, 0, memoryview(header))
        at = 0 if header != planned.header else None
        for span in planned.ranges if at is None else ():
            source = copier.open(span.file)
            at = _first_difference(source, span.offset, fd, span.target, span.length, path.name)
            if at is not None:
                break
    finally:
        os.close(fd)
    if at is not None:
        path.unlink()
        raise HashError(
            f"{path.name}: expected the source's bytes after writing, got others near byte {at}",
            hint="the source is untouched; check the disk, then run the same command again",
        )


def _first_difference(
    source: int, offset: int, target: int, target_offset: int, length: int, file: str
) -> int | None:
    """Return where a range of the target begins to differ, within a few megabytes."""
    ours, theirs = bytearray(_COMPARE_BYTES), bytearray(_COMPARE_BYTES)
    for begin in range(0, length, _COMPARE_BYTES):
        count = min(_COMPARE_BYTES, length - begin)
        for fd, start, buffer in ((source, offset, ours), (target, target_offset, theirs)):
            if fill(fd, file, start + begin, memoryview(buffer)[:count]) < count:
                return target_offset + begin
        if ours != theirs:  # beyond `count` both hold the same earlier bytes
            return target_offset + begin
    return None


def _free(aside: SetAside, blocks: list[tuple[str, int, int]]) -> None:
    by_file: Mapping[str, list[tuple[int, int]]] = {file: [] for file, _, _ in blocks}
    for file, begin, end in blocks:
        by_file[file].append((begin, end))
    for file, spans in by_file.items():
        path = aside.path(file)
        if not path.exists() or path.stat().st_nlink > 1:
            continue
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            for begin, end in spans:
                punch_hole(fd, begin, end)
        finally:
            os.close(fd)


def _end(folder: Path) -> None:
    if is_set_aside(folder):
        end_set_aside(folder)
