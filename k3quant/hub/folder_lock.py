"""One download at a time in a folder."""

import errno
import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from k3quant.checkpoint.output_file import write_error
from k3quant.errors import RefusedError
from k3quant.hub.record import LOCK_FILE


class FolderLock:
    """Holds a folder for the length of a `with`; the folder is created where it does not exist.

    Raises:
        RefusedError: Another download is at work there.
        ResourceError: The folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / LOCK_FILE
        self._fd = -1

    def __enter__(self) -> Self:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._fd = self._open_locked()
        except BlockingIOError as error:
            raise RefusedError(
                f"{self._folder}: expected no other download in the folder, got one at work",
                hint="wait for it, or end it and run this command again",
            ) from error
        except OSError as error:
            raise write_error(self._path, error, need=0) from error
        return self

    def _open_locked(self) -> int:
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Whoever held it before may have removed the file that was opened here.
                if self._path.exists() and os.path.samestat(self._path.stat(), os.fstat(fd)):
                    return fd
                os.close(fd)
            except OSError as error:
                # Some network file systems have no locks; the work itself does not need them.
                if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP):
                    return fd
                os.close(fd)
                raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Unlinking while the lock is held: whoever comes next makes a file of its own.
        self._path.unlink(missing_ok=True)
        os.close(self._fd)
