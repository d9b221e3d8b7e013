"""A file that appears under its name whole or not at all, with its digest.

It grows as `NAME.partial` and takes its name only after its last byte is on the disk.
"""

import errno
import os
from bisect import bisect_right
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, Self

import numpy.typing as npt

from k3quant.checkpoint.following_hash import FollowingHash
from k3quant.checkpoint.page_cache import start_writeback
from k3quant.errors import K3QuantError, ResourceError
from k3quant.sizes import format_size

PARTIAL_SUFFIX = ".partial"

_WRITEBACK_BYTES = 32 << 20

Buffer = bytes | bytearray | memoryview | npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """A finished file: its name, size in bytes and sha256 in hex, empty where none was computed."""

    file: str
    size: int
    sha256: str


class OutputFile:
    """A file of known size that appears under its name whole or not at all.

    Used in a `with`: leaving it checks that every byte was written once, syncs, renames and syncs
    the folder; an exception removes what was written. `write_at` may be called from any thread.

    Attributes:
        path: The final path.
        size: Bytes of the file.
        fd: Descriptor of the growing file, inside the `with`.

    Args:
        path: The final path.
        size: Bytes of the file.
        digest: Whether to compute the sha256; without, `written` has an empty one.
    """

    def __init__(self, path: Path, *, size: int, digest: bool = True) -> None:
        self.path = path
        self.size = size
        self.fd = -1
        self._partial = path.with_name(path.name + PARTIAL_SUFFIX)
        self._hash: FollowingHash | None = None
        self._wants_digest = digest
        self._handed_over = 0
        self._covered = _Coverage()
        self._lock = Lock()
        self._written: WrittenFile | None = None

    @property
    def written(self) -> WrittenFile:
        """Size and digest, once the `with` was left.

        Raises:
            ValueError: The file is not finished.
        """
        if self._written is None:
            raise ValueError(f"{self.path.name}: expected a finished file, got an open one")
        return self._written

    def __enter__(self) -> Self:
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            self.fd = os.open(self._partial, flags, 0o666)
            _reserve(self.fd, self.size)
        except OSError as error:
            self._abandon()
            raise write_error(self.path, error, need=self.size) from error
        if self._wants_digest:
            self._hash = FollowingHash(self.fd, self.path)
        return self

    def write_at(self, offset: int, buffer: Buffer) -> None:
        """Write bytes at an offset of the file.

        Raises:
            ValueError: They reach beyond the end, or were written before.
            ResourceError: The system refused the write.
        """
        view = byte_view(buffer)
        if offset < 0 or offset + len(view) > self.size:
            raise ValueError(
                f"{self.path.name}: expected a range within {self.size} bytes, got "
                f"[{offset}, {offset + len(view)}]"
            )
        try:
            write_all(self.fd, offset, view)
        except OSError as error:
            raise write_error(self.path, error, need=self.size) from error
        self.mark(offset, offset + len(view))

    def mark(self, begin: int, end: int) -> None:
        """Count a range as written, for bytes that reached the file through `fd`.

        Raises:
            ValueError: A part of it was counted before.
        """
        with self._lock:
            if not self._covered.add(begin, end):
                raise ValueError(
                    f"{self.path.name}: expected each byte written once, got a part of "
                    f"[{begin}, {end}] twice"
                )
            grown, handed_over = self._covered.first_gap(), self._handed_over
            if self._hash is not None:
                self._hash.grow(grown)
            if grown - handed_over < _WRITEBACK_BYTES:
                return
            self._handed_over = grown
        start_writeback(self.fd, handed_over, grown - handed_over)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._abandon()
            return
        try:
            self._commit()
        except BaseException:
            self._abandon()
            raise

    def first_gap(self) -> int:
        """Return the offset of the first byte that was not written."""
        with self._lock:
            return self._covered.first_gap()

    def _commit(self) -> None:
        gap = self.first_gap()
        if gap < self.size:
            raise ValueError(f"{self.path.name}: expected {self.size} bytes, got none at {gap}")
        digest = self._hash.finish(self.size) if self._hash is not None else ""
        try:
            os.fsync(self.fd)
            os.close(self.fd)
            self.fd = -1
            self._partial.replace(self.path)
            sync_folder(self.path.parent)
        except OSError as error:
            raise write_error(self.path, error, need=self.size) from error
        self._written = WrittenFile(file=self.path.name, size=self.size, sha256=digest)

    def _abandon(self) -> None:
        if self._hash is not None:
            self._hash.stop()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            with suppress(OSError):  # the first fault is the one to report
                self._partial.unlink()


def atomic_write(path: Path, data: bytes) -> WrittenFile:
    """Write a small file under a temporary name, sync it, rename it, sync its folder.

    Raises:
        ResourceError: The system refused.
    """
    with OutputFile(path, size=len(data)) as output:
        output.write_at(0, data)
    return output.written


def free_bytes(folder: Path) -> int:
    """Return the bytes this user may still write where a folder lies or will lie."""
    while not folder.exists():
        folder = folder.parent
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def preflight_space(
    folder: Path, need: int, *, free: Callable[[Path], int] = free_bytes, hint: str = ""
) -> None:
    """Refuse to start what the disk cannot hold.

    Args:
        folder: Where the bytes will go; it need not exist yet.
        need: Bytes that will be written.
        free: Tells the free bytes of a folder.
        hint: A way to need less.

    Raises:
        ResourceError: Less than `need` is free.
    """
    have = free(folder)
    if have < need:
        raise ResourceError(
            f"{folder}: need {format_size(need)}, have {format_size(have)}, "
            f"short {format_size(need - have)}",
            hint=hint,
        )


def sync_folder(folder: Path) -> None:
    """Make renames and removals in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, offset: int, view: memoryview) -> None:
    """Write a whole buffer at an offset, however few bytes the system takes at a time."""
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)


def byte_view(buffer: Buffer) -> memoryview:
    """Return the bytes of a C-contiguous buffer, of any shape, without a copy."""
    view = memoryview(buffer)  # type: ignore[arg-type]  # numpy arrays export a buffer
    return view.cast("B") if view.nbytes else memoryview(b"")


def write_error(path: Path, error: OSError, *, need: int) -> K3QuantError:
    """Return what a failed write means for a person.

    Args:
        path: What was written.
        error: The system's answer.
        need: Size of the file, 0 where none is being filled.
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        have = free_bytes(path.parent)
        return ResourceError(
            f"{path.name}: no space left: need {format_size(need)}, have {format_size(have)}, "
            f"short {format_size(max(need - have, 0))}",
            hint="free some space and run the same command again",
        )
    reason = os.strerror(error.errno or 0).lower()
    what = format_size(need) if need else "it"
    return ResourceError(f"{path.name}: expected to write {what}, got {reason}")


def _reserve(fd: int, size: int) -> None:
    if size == 0:
        return
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(fd, size)


class _Coverage:
    """Byte ranges that were written, disjoint and merged, in order."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    def add(self, begin: int, end: int) -> bool:
        """Add a range; False if a part of it was there. An empty range changes nothing."""
        if begin == end:
            return True
        at = bisect_right(self._begins, begin)
        if (at and self._ends[at - 1] > begin) or (
            at < len(self._begins) and self._begins[at] < end
        ):
            return False
        self._begins.insert(at, begin)
        self._ends.insert(at, end)
        if at + 1 < len(self._begins) and self._begins[at + 1] == end:
            self._ends[at] = self._ends.pop(at + 1)
            del self._begins[at + 1]
        if at and self._ends[at - 1] == begin:
            self._ends[at - 1] = self._ends.pop(at)
            del self._begins[at]
        return True

    def first_gap(self) -> int:
        return self._ends[0] if self._begins and self._begins[0] == 0 else 0
