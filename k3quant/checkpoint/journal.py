"""The resume record of a long job: what it was asked, and which outputs are finished.

One file of JSON lines in the output folder, each line synced before the work goes on: the job
first, then one line a finished output, then `{"complete": true}`. A line that a crash cut is
dropped. The file is locked while a job runs, so that two never write into one folder.
"""

import errno
import fcntl
import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, Self

from k3quant import __version__
from k3quant.checkpoint.folder import LocalFolder
from k3quant.checkpoint.output_file import WrittenFile, sync_folder, write_all, write_error
from k3quant.checkpoint.reader import CONFIG_FILE, Checkpoint
from k3quant.errors import RefusedError, StructureError

JOURNAL_FILE = ".k3quant-journal.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStamp:
    """What tells a source file from another of its name.

    Attributes:
        size: Bytes.
        mtime_ns: Time of the last change, None where the source keeps none.
        header_sha256: Digest of a shard's header with its length bytes, of all bytes elsewhere.
    """

    size: int
    mtime_ns: int | None
    header_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What decides every byte of a job's outputs.

    Attributes:
        command: Name of the command.
        parameters: Its parameters, as JSON values.
        source: Stamp of every source file.
        version: Version of k3quant.
    """

    command: str
    parameters: dict[str, Any]
    source: dict[str, FileStamp]
    version: str = __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedOutput:
    """An output that is whole on the disk, with what its job wants to remember about it."""

    written: WrittenFile
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalState:
    """A journal as it lies: its job, the outputs that are there, and whether the job ended."""

    job: Job
    finished: dict[str, FinishedOutput]
    complete: bool


class Journal:
    """The open journal of a job, for use in a `with`; `record` may be called from any thread.

    Attributes:
        folder: The output folder.
        job: The job.
        finished: Finished outputs by file, those that are still there with the right size.
        complete: Whether the job ended.
    """

    def __init__(self, folder: Path, job: Job, fd: int, lines: list[dict[str, Any]]) -> None:
        self.folder = folder
        self.job = job
        self._fd = fd
        self._lock = Lock()
        self.finished, self.complete = _outcome(folder, lines)

    def record(self, written: WrittenFile, *, details: dict[str, Any] | None = None) -> None:
        """Remember an output that is whole on the disk.

        Args:
            written: The output; its file lies in the journal's folder.
            details: JSON values to have again on a re-run.

        Raises:
            ResourceError: The journal cannot be written.
        """
        output = FinishedOutput(written=written, details=details or {})
        line = {"file": written.file, "size": written.size, "sha256": written.sha256}
        with self._lock:
            self._append(line | ({"details": details} if details else {}))
            self.finished[written.file] = output

    def mark_complete(self) -> None:
        """Remember that the job ended.

        Raises:
            ResourceError: The journal cannot be written.
        """
        with self._lock:
            self._append({"complete": True})
            self.complete = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._fd)

    def _append(self, line: dict[str, Any]) -> None:
        _append_line(self._fd, self.folder, line)


def open_journal(folder: Path, job: Job, *, may_hold_files: bool = False) -> Journal:
    """Open the journal of an output folder, or start one in an empty folder.

    Args:
        folder: The output folder; it is created where it does not exist.
        job: The job to run or to resume.
        may_hold_files: Start in a folder that holds files already, as work in place does.

    Raises:
        RefusedError: The folder holds files of no job or of another one, or a job is at work there.
        StructureError: The journal is damaged before its last line.
        ResourceError: The folder cannot be written.
    """
    path = folder / JOURNAL_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists() and not may_hold_files:
            _refuse_full(folder)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise write_error(path, error, need=0) from error
    try:
        _take_lock(fd, folder)
        lines, whole = _read_lines(fd, path)
        if whole < os.fstat(fd).st_size:
            os.ftruncate(fd, whole)  # what a cut last line said was not yet relied on
        if not lines:
            if not may_hold_files:
                _refuse_full(folder)
            _append_line(fd, folder, _job_line(job))
            sync_folder(folder)
            return Journal(folder, job, fd, [])
        _refuse_other(folder, _job_of(lines[0]), job)
        return Journal(folder, job, fd, lines[1:])
    except BaseException:
        os.close(fd)
        raise


def read_journal(folder: Path) -> JournalState | None:
    """Return what a folder's journal says without opening it for work, None without one.

    Raises:
        StructureError: The journal is damaged before its last line.
    """
    path = folder / JOURNAL_FILE
    if not path.exists():
        return None
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        lines, _ = _read_lines(fd, path)
    finally:
        os.close(fd)
    if not lines:
        return None
    finished, complete = _outcome(folder, lines[1:])
    return JournalState(job=_job_of(lines[0]), finished=finished, complete=complete)


def stamp_source(checkpoint: Checkpoint) -> dict[str, FileStamp]:
    """Return the stamp of every file of a checkpoint that decides an output's bytes.

    Raises:
        IncompleteError: A file is gone.
        ResourceError: The system refused a read.
    """
    source = checkpoint.source
    root = source.root if isinstance(source, LocalFolder) else None
    heads = {file: header.data_start for file, header in checkpoint.headers.items()}
    heads[CONFIG_FILE] = source.files[CONFIG_FILE].size
    return {
        file: FileStamp(
            size=source.files[file].size,
            mtime_ns=(root / file).stat().st_mtime_ns if root is not None else None,
            header_sha256=hashlib.sha256(source.read(file, 0, length)).hexdigest(),
        )
        for file, length in sorted(heads.items())
    }


def _refuse_full(folder: Path) -> None:
    there = sorted(entry.name for entry in folder.iterdir() if entry.name != JOURNAL_FILE)
    if there:
        raise RefusedError(
            f"{folder}: expected an empty output folder, got {len(there)} entries "
            f"({', '.join(there[:3])})",
            hint="name a new folder; only a folder with a journal is resumed",
        )


def _refuse_other(folder: Path, old: Job, new: Job) -> None:
    new = _job_of(_job_line(new))  # both as JSON has them
    if (old.command, old.version) != (new.command, new.version):
        raise RefusedError(
            f"{folder}: expected to resume `{old.command}` of k3quant {old.version}, got "
            f"`{new.command}` of k3quant {new.version}",
            hint="name a new output folder",
        )
    if old.parameters != new.parameters:
        raise RefusedError(
            f"{folder}: expected the parameters it was started with, "
            f"{json.dumps(old.parameters)}, got {json.dumps(new.parameters)}",
            hint="repeat the first command to resume it, or name a new output folder",
        )
    if old.source != new.source:
        files = sorted(old.source.keys() | new.source.keys())
        file = next(f for f in files if old.source.get(f) != new.source.get(f))
        raise RefusedError(
            f"{folder}: expected the source it was started with, got another or changed one: "
            f"{file} was {_spell(old.source.get(file))}, is {_spell(new.source.get(file))}",
            hint="name a new output folder",
        )


def _spell(stamp: FileStamp | None) -> str:
    if stamp is None:
        return "absent"
    changed = "" if stamp.mtime_ns is None else f", changed at {stamp.mtime_ns} ns"
    return f"{stamp.size} bytes{changed}, header {stamp.header_sha256[:12]}"


def _take_lock(fd: int, folder: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise RefusedError(
            f"{folder}: expected no other job in the output folder, got one at work",
            hint="wait for it, or end it and run this command again",
        ) from error
    except OSError as error:
        # Some network file systems have no locks; the work itself does not need them.
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
            raise


def _append_line(fd: int, folder: Path, line: dict[str, Any]) -> None:
    text = json.dumps(line, separators=(",", ":")).encode() + b"\n"
    try:
        write_all(fd, os.lseek(fd, 0, os.SEEK_END), memoryview(text))
        os.fsync(fd)
    except OSError as error:
        raise write_error(folder / JOURNAL_FILE, error, need=len(text)) from error


def _read_lines(fd: int, path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the whole lines and the bytes they take."""
    raw = os.pread(fd, os.fstat(fd).st_size, 0)
    whole = raw[: raw.rfind(b"\n") + 1]
    try:
        lines = [json.loads(line) for line in whole.splitlines()]
        if lines:
            _job_of(lines[0])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StructureError(
            f"{path}: expected lines of JSON that begin with a job, got {error!r}",
            hint="the journal is damaged; name a new output folder",
        ) from error
    return lines, len(whole)


def _job_line(job: Job) -> dict[str, Any]:
    line = {
        "command": job.command,
        "version": job.version,
        "parameters": job.parameters,
        "source": {
            file: [stamp.size, stamp.mtime_ns, stamp.header_sha256]
            for file, stamp in job.source.items()
        },
    }
    document = json.loads(json.dumps(line))
    assert isinstance(document, dict)
    return document


def _job_of(line: dict[str, Any]) -> Job:
    return Job(
        command=line["command"],
        version=line["version"],
        parameters=line["parameters"],
        source={
            file: FileStamp(size=size, mtime_ns=mtime, header_sha256=digest)
            for file, (size, mtime, digest) in line["source"].items()
        },
    )


def _outcome(folder: Path, lines: list[dict[str, Any]]) -> tuple[dict[str, FinishedOutput], bool]:
    """Return the outputs that are still there as they were recorded, and whether the job ended."""
    last = {line["file"]: line for line in lines if "file" in line}
    finished = {
        file: FinishedOutput(
            written=WrittenFile(file=file, size=line["size"], sha256=line["sha256"]),
            details=line.get("details", {}),
        )
        for file, line in last.items()
        if _size_of(folder / file) == line["size"]
    }
    ended = any("complete" in line for line in lines)
    return finished, ended and len(finished) == len(last)


def _size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None
