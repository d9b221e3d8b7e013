"""Copies ranges between files by the cheapest way that works: shared blocks, kernel, or a buffer.

Whether a file system shares blocks (reflinks) or copies in the kernel is found by trying. The
kernel's way, which on network file systems spares both directions of the wire, is left only where
a buffer is clearly faster.
"""

import errno
import fcntl
import os
import struct
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from time import perf_counter

from k3quant.checkpoint.folder import read_error
from k3quant.checkpoint.output_file import PARTIAL_SUFFIX, sync_folder, write_all, write_error
from k3quant.errors import IncompleteError, RefusedError

COPY_BUFFER_BYTES = 2 << 20
_BUFFERS_A_STEP = 4  # copied between two reports of progress
_FICLONERANGE = 0x4020940D  # _IOW(0x94, 13, struct file_clone_range)
_TRIAL_BYTES = 32 << 20  # copied by each way before one is chosen
_CLEARLY_FASTER = 1.5
_NOT_HERE = {
    errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.EBADF,
    errno.EPERM, errno.ETXTBSY,
}  # fmt: skip


class CopyWay(StrEnum):
    """How bytes travel."""

    REFLINK = "reflink"
    KERNEL = "kernel"
    BUFFER = "buffer"


class RangeCopier:
    """Copies ranges between open files, remembering which ways work. Not for several threads.

    Attributes:
        copied: Bytes copied so far by each way.
    """

    def __init__(self, *, buffer_bytes: int = COPY_BUFFER_BYTES) -> None:
        self._buffer = memoryview(bytearray(buffer_bytes))
        self._step = _BUFFERS_A_STEP * buffer_bytes
        self._refused: set[CopyWay] = set()
        self._trial: dict[CopyWay, list[float]] = {
            CopyWay.KERNEL: [0.0, 0.0],
            CopyWay.BUFFER: [0.0, 0.0],
        }
        self.copied = dict.fromkeys(CopyWay, 0)

    def copy(
        self,
        source: int,
        offset: int,
        target: int,
        target_offset: int,
        length: int,
        *,
        file: str,
        done: Callable[[int, int], None],
    ) -> None:
        """Copy a range of one open file into another.

        Args:
            source: Descriptor to read.
            offset: First byte there.
            target: Descriptor to write.
            target_offset: First byte there.
            length: Bytes.
            file: Name of the source, for messages.
            done: Told each copied range of the target, as begin and end.

        Raises:
            IncompleteError: The source ends inside the range.
            ResourceError: The system refused the read.
            OSError: The system refused the write.
        """
        cloned = self._clone(source, offset, target, target_offset, length)
        position = 0
        for begin, end in (cloned, (length, length)):
            while position < begin:
                step = min(self._step, begin - position)
                self._move(source, offset + position, target, target_offset + position, step, file)
                done(target_offset + position, target_offset + position + step)
                position += step
            if end > begin:
                done(target_offset + begin, target_offset + end)
            position = end

    def _move(self, source: int, at: int, target: int, to: int, length: int, file: str) -> None:
        way = self._choose()
        start = perf_counter()
        moved = 0
        if way is CopyWay.KERNEL:
            moved = self._in_kernel(source, at, target, to, length)
        if moved < length:
            way = CopyWay.BUFFER
            self._through_buffer(source, at, target, to, length, file, moved)
        self.copied[CopyWay.KERNEL] += moved
        self.copied[CopyWay.BUFFER] += length - moved
        trial = self._trial[way]
        trial[0] += length
        trial[1] += perf_counter() - start

    def _choose(self) -> CopyWay:
        if CopyWay.KERNEL in self._refused:
            return CopyWay.BUFFER
        kernel, buffer = self._trial[CopyWay.KERNEL], self._trial[CopyWay.BUFFER]
        for way, (moved, _) in ((CopyWay.KERNEL, kernel), (CopyWay.BUFFER, buffer)):
            if moved < _TRIAL_BYTES:
                return way
        slower = buffer[0] / buffer[1] > _CLEARLY_FASTER * kernel[0] / kernel[1]
        return CopyWay.BUFFER if slower else CopyWay.KERNEL

    def _in_kernel(self, source: int, at: int, target: int, to: int, length: int) -> int:
        moved = 0
        while moved < length:
            try:
                got = os.copy_file_range(source, target, length - moved, at + moved, to + moved)
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                got = 0
            if got == 0:
                self._refused.add(CopyWay.KERNEL)
                break
            moved += got
        return moved

    def _through_buffer(
        self, source: int, at: int, target: int, to: int, length: int, file: str, moved: int
    ) -> None:
        while moved < length:
            piece = self._buffer[: length - moved]
            ahead = min(len(self._buffer), length - moved - len(piece))
            try:
                if ahead:  # the disk reads the next piece while this one is written
                    next_piece = at + moved + len(piece)
                    os.posix_fadvise(source, next_piece, ahead, os.POSIX_FADV_WILLNEED)
                got = os.preadv(source, [piece], at + moved)
            except OSError as error:
                raise read_error(file, error, at + moved) from error
            if got == 0:
                raise IncompleteError(
                    f"{file}: expected {length} bytes at offset {at}, got {moved} "
                    "(the file shrank or was cut)"
                )
            write_all(target, to + moved, piece[:got])
            moved += got

    def _clone(
        self, source: int, offset: int, target: int, target_offset: int, length: int
    ) -> tuple[int, int]:
        """Share the whole blocks of a range, and return which part of it that was."""
        nothing = (length, length)
        block = os.fstatvfs(target).f_bsize
        # Blocks can be shared only where both files cut the range at the same places.
        if CopyWay.REFLINK in self._refused or (offset - target_offset) % block:
            return nothing
        begin = -offset % block
        end = length - (offset + length) % block
        if begin >= end:
            return nothing
        request = struct.pack("qQQQ", source, offset + begin, end - begin, target_offset + begin)
        try:
            fcntl.ioctl(target, _FICLONERANGE, request)
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
            self._refused.add(CopyWay.REFLINK)
            return nothing
        self.copied[CopyWay.REFLINK] += end - begin
        return begin, end


def link_file(source: Path, target: Path) -> None:
    """Give a file a second name, replacing what the name meant before.

    Raises:
        RefusedError: The file system cannot link the two places.
        ResourceError: The system refused for another reason.
    """
    partial = target.with_name(target.name + PARTIAL_SUFFIX)
    try:
        partial.unlink(missing_ok=True)
        # Renaming a link over another link of the same file would do nothing.
        if target.exists() and target.samefile(source):
            return
        os.link(source.resolve(), partial)
        partial.replace(target)
        sync_folder(target.parent)
    except OSError as error:
        if error.errno in (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
            raise RefusedError(
                f"{target.name}: expected a hard link to {source}, got "
                f"{os.strerror(error.errno).lower()}",
                hint="links need one file system on both sides; leave out `--link` to copy",
            ) from error
        raise write_error(target, error, need=0) from error
