"""Open files of a walk: where ranges are read, and how where they are not in memory yet.

A checkpoint that is larger than the memory would push every page out before its next use. So what
is not in the page cache leaves nothing there, whichever way is the faster on this disk.
"""

import os
import threading
from dataclasses import dataclass
from pathlib import Path

from k3quant.checkpoint.folder import read_error
from k3quant.checkpoint.page_cache import forget, read_ahead
from k3quant.stream.trial import Trial, Way

CACHED_SHARE = 0.75
"""Of the machine's memory that a checkpoint may take and be kept in the page cache."""


@dataclass(frozen=True, slots=True)
class Range:
    """A range of a file that is about to be read.

    Attributes:
        fd: The descriptor to read it with.
        offset: Its first byte.
        length: Its bytes.
        way: Which way was chosen; None for what is in memory or shall stay there.
    """

    fd: int
    offset: int
    length: int
    way: Way | None


@dataclass(frozen=True, slots=True)
class _Opened:
    cached: int
    direct: int | None


class OpenFiles:
    """Files of a folder, each opened when it is first read."""

    def __init__(self, root: Path, *, keep: bool, whole_pages: bool, at_once: int) -> None:
        """Remember the folder.

        Args:
            root: The folder.
            keep: Whether what is read may stay in the page cache.
            whole_pages: Whether ranges are read in whole pages to whole pages of memory, without
                which there is no way past the cache.
            at_once: Ranges that are read at a time.
        """
        self._root = root
        self._keep = keep
        self._whole_pages = whole_pages
        self._lock = threading.Lock()
        self._opened: dict[str, _Opened] = {}
        self._trial = Trial((Way.PAST_CACHE, Way.THROUGH_CACHE), at_once=at_once)

    def begin(self, file: str, offset: int, length: int) -> Range:
        """Choose how to read a range; the kernel may begin already.

        Raises:
            IncompleteError: There is no such file.
            ResourceError: The system refused to open it.
        """
        with self._lock:
            opened = self._opened.get(file)
            if opened is None:
                opened = self._opened[file] = self._open(file)
        if _in_cache(opened.cached, offset, length):
            return Range(opened.cached, offset, length, None)
        way = None if self._keep else self._trial.next()
        if way is Way.PAST_CACHE and opened.direct is not None:
            return Range(opened.direct, offset, length, way)
        read_ahead(opened.cached, offset, length)
        return Range(opened.cached, offset, length, None if way is None else Way.THROUGH_CACHE)

    def end(self, done: Range) -> None:
        """Take notice of a range that was read."""
        if done.way is None:
            return
        if done.way is Way.THROUGH_CACHE:
            forget(done.fd, done.offset, done.length)
        self._trial.finished(done.way, done.length)

    def close(self) -> None:
        """Close all files."""
        for opened in self._opened.values():
            os.close(opened.cached)
            if opened.direct is not None:
                os.close(opened.direct)
        self._opened.clear()

    def _open(self, file: str) -> _Opened:
        flags = os.O_RDONLY | os.O_CLOEXEC
        try:
            cached = os.open(self._root / file, flags)
        except OSError as error:
            raise read_error(file, error) from error
        direct: int | None = None
        if self._whole_pages and not self._keep and hasattr(os, "O_DIRECT"):
            try:
                direct = os.open(self._root / file, flags | os.O_DIRECT)
            except OSError:  # the file system has nothing past the cache
                direct = None
        return _Opened(cached, direct)


def outgrows_memory(num_bytes: int) -> bool:
    """Return whether so many bytes cannot stay in the page cache together."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return num_bytes > CACHED_SHARE * memory


def _in_cache(fd: int, offset: int, length: int) -> bool:
    """Return whether a range's first and last byte can be read without waiting for the disk."""
    without_waiting = getattr(os, "RWF_NOWAIT", None)
    if without_waiting is None:
        return True
    for place in (offset, offset + length - 1):
        try:
            os.preadv(fd, [bytearray(1)], place, without_waiting)
        except BlockingIOError:
            return False
        except OSError:  # the file system does not say
            return True
    return True
