"""Gives back the blocks of a file's tensors that lie elsewhere, while the file itself stays."""

import ctypes
import errno
import os
from bisect import bisect_left, bisect_right
from pathlib import Path
from tempfile import TemporaryFile

_PUNCH_HOLE = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE


class DoneRanges:
    """Disjoint ranges of a file that are no longer needed, merged where they touch."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    def add(self, begin: int, end: int) -> tuple[int, int]:
        """Add a range and return the merged one that it is now part of."""
        first = bisect_left(self._ends, begin)
        last = bisect_right(self._begins, end)
        if first < last:
            begin = min(begin, self._begins[first])
            end = max(end, self._ends[last - 1])
        self._begins[first:last] = [begin]
        self._ends[first:last] = [end]
        return begin, end


def free_blocks(done: DoneRanges, begin: int, end: int, *, block: int) -> tuple[int, int]:
    """Add a range to those done and return the whole blocks that nobody needs now because of it.

    Args:
        done: Ranges of the file that are done.
        begin: First byte of the new range.
        end: Byte after its last.
        block: Size of a block.

    Returns:
        Begin and end of the blocks, equal where there are none.
    """
    outer_begin, outer_end = done.add(begin, end)
    low = max(-(-outer_begin // block) * block, begin // block * block)
    high = min(outer_end // block * block, -(-end // block) * block)
    return low, max(low, high)


def punch_hole(fd: int, begin: int, end: int) -> None:
    """Give back the blocks of a range; it reads as zeros then and the file keeps its size.

    Raises:
        OSError: The file system cannot, or refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    offset, length = ctypes.c_int64(begin), ctypes.c_int64(end - begin)
    if libc.fallocate(ctypes.c_int(fd), ctypes.c_int(_PUNCH_HOLE), offset, length) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def can_punch(folder: Path) -> bool:
    """Return whether the file system of a folder gives back parts of a file."""
    with TemporaryFile(dir=folder) as probe:
        probe.write(bytes(2 * 4096))
        probe.flush()
        try:
            punch_hole(probe.fileno(), 0, 4096)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
                return False
            raise
    return True
