"""The sha256 of a file that is still growing, computed behind its writer."""

import errno
import hashlib
import os
from pathlib import Path
from threading import Condition, Thread

from k3quant.checkpoint.page_cache import drop_behind
from k3quant.errors import ResourceError

_HASH_CHUNK = 1 << 20
_DROP_BYTES = 64 << 20


class FollowingHash:
    """Hashes a growing file behind its writer, in a thread once there is enough to read.

    The bytes are read back from the file, so they need not be written in order and the writer's
    buffers are free again at once.
    """

    def __init__(self, fd: int, path: Path) -> None:
        self._fd = fd
        self._path = path
        self._sha = hashlib.sha256()
        self._done = 0
        self._dropped = 0
        self._limit = 0
        self._closing = False
        self._wake = Condition()
        self._thread: Thread | None = None
        self._error: OSError | None = None

    def grow(self, limit: int) -> None:
        """Say that every byte before `limit` was written."""
        if limit - self._limit < _HASH_CHUNK:
            return
        with self._wake:
            self._limit = limit
            self._wake.notify()
        if self._thread is None:
            self._thread = Thread(target=self._follow, name="hash", daemon=True)
            self._thread.start()

    def finish(self, size: int) -> str:
        """Hash what is left of a file that is fully written, and return the digest.

        Raises:
            ResourceError: The file could not be read back.
        """
        self._end(size)
        if self._error is not None:
            reason = os.strerror(self._error.errno or 0).lower()
            raise ResourceError(f"{self._path.name}: expected to read it back, got {reason}")
        self._read_to(size)
        return self._sha.hexdigest()

    def stop(self) -> None:
        """Let the thread end without the rest."""
        self._end(0)

    def _end(self, limit: int) -> None:
        with self._wake:
            self._closing = True
            self._limit = limit
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    def _follow(self) -> None:
        while True:
            with self._wake:
                while self._limit <= self._done and not self._closing:
                    self._wake.wait()
                limit = self._limit
                if limit <= self._done:
                    return
            try:
                self._read_to(limit)
            except OSError as error:
                self._error = error
                return

    def _read_to(self, limit: int) -> None:
        buffer = bytearray(min(_HASH_CHUNK, max(limit - self._done, 0)))
        view = memoryview(buffer)
        while self._done < limit and not (self._closing and self._limit == 0):
            piece = view[: limit - self._done]
            got = os.preadv(self._fd, [piece], self._done)
            if got == 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            self._sha.update(piece[:got])
            self._done += got
            if self._done - self._dropped >= 2 * _DROP_BYTES:
                # One piece stays behind: whoever wrote the bytes may still be reading them back.
                drop_behind(self._fd, self._dropped, _DROP_BYTES)
                self._dropped += _DROP_BYTES
