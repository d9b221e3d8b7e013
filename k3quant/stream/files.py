"""Open files of a walk: read through the page cache, or past it where a page is not in it.

A checkpoint that is larger than the memory would push every page out before its next use, at the
price of a copy and of finding room for each. What somebody has in the cache is read from there.
"""

import os
import threading
from dataclasses import dataclass
from pathlib import Path

from k3quant.checkpoint.folder import read_error

CACHED_SHARE = 0.75
"""Of the machine's memory that a checkpoint may take and be kept in the page cache."""


@dataclass(frozen=True, slots=True)
class _Opened:
    cached: int
    direct: int | None


class OpenFiles:
    """Files of a folder, each opened when it is first read."""

    def __init__(self, root: Path, *, past_cache: bool) -> None:
        """Remember the folder.

        Args:
            root: The folder.
            past_cache: Whether ranges that are not in the page cache are read past it.
        """
        self._root = root
        self._past_cache = past_cache
        self._lock = threading.Lock()
        self._opened: dict[str, _Opened] = {}

    def descriptor(self, file: str, offset: int, length: int) -> int:
        """Return the descriptor to read a range with.

        Raises:
            IncompleteError: There is no such file.
            ResourceError: The system refused to open it.
        """
        with self._lock:
            opened = self._opened.get(file)
            if opened is None:
                opened = self._opened[file] = self._open(file)
        if opened.direct is None or _in_cache(opened.cached, offset, length):
            return opened.cached
        return opened.direct

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
        if self._past_cache and hasattr(os, "O_DIRECT") and hasattr(os, "RWF_NOWAIT"):
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
    for place in (offset, offset + length - 1):
        try:
            os.preadv(fd, [bytearray(1)], place, os.RWF_NOWAIT)
        except BlockingIOError:
            return False
        except OSError:  # the file system does not say
            return True
    return True
