"""A checkpoint's files in a local folder, read by ranges.

Ranges are read with `pread`, never mapped: a file that shrinks gives an error here, where a map
would give the process a fatal signal.
"""

import errno
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from k3quant.errors import IncompleteError, K3QuantError, ResourceError


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInfo:
    """One file of a checkpoint.

    Attributes:
        size: Bytes.
        regular: Whether it is a regular file.
        sha256: Digest that the place itself states, as a Hub listing does; None elsewhere.
    """

    size: int
    regular: bool = True
    sha256: str | None = None


class Source(Protocol):
    """Where a checkpoint's files come from."""

    @property
    def label(self) -> str:
        """How people name the place."""

    @property
    def files(self) -> Mapping[str, FileInfo]:
        """Every file by its path below the root, with `/` between folders."""

    def read(self, file: str, offset: int, length: int) -> bytes:
        """Read a range, fewer bytes only where the file ends."""

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from a range; a file that ends too early is an error."""


@runtime_checkable
class RemoteSource(Source, Protocol):
    """A source where each read costs a round trip, so that many headers are better had at once."""

    def prefetch_headers(self, files: Iterable[str]) -> None:
        """Fetch the headers of shards side by side, so that reading them costs nothing."""


def prefetch_headers(source: Source, files: Iterable[str]) -> None:
    """Fetch the headers of shards side by side where that is faster; raises as the source does."""
    if isinstance(source, RemoteSource):
        source.prefetch_headers(file for file in files if file in source.files)


class LocalFolder:
    """A folder on this machine."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            what = "a file" if root.exists() else "nothing"
            raise IncompleteError(
                f"{root}: expected a checkpoint folder, got {what}",
                hint="name a folder with config.json and *.safetensors",
            )
        self.root = root
        self._files = _list_files(root)

    @property
    def label(self) -> str:
        """The folder's path."""
        return str(self.root)

    @property
    def files(self) -> Mapping[str, FileInfo]:
        """Every file below the folder, as it was when the folder was opened."""
        return self._files

    def read(self, file: str, offset: int, length: int) -> bytes:
        """Read a range, fewer bytes only where the file ends.

        Raises:
            IncompleteError: The file does not exist.
            ResourceError: The system refused the read.
        """
        with _Opened(self.root / file, file) as fd:
            return read_range(fd, file, offset, length)

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from a range.

        Raises:
            IncompleteError: The file does not exist or ends inside the range.
            ResourceError: The system refused the read.
        """
        with _Opened(self.root / file, file) as fd:
            got = fill(fd, file, offset, buffer)
        if got < len(buffer):
            raise IncompleteError(
                f"{file}: expected {len(buffer)} bytes at offset {offset}, got {got} "
                "(the file shrank or was cut)"
            )


def read_range(fd: int, file: str, offset: int, length: int) -> bytes:
    """Read a range of an open file, fewer bytes only where the file ends.

    Raises:
        ResourceError: The system refused the read.
    """
    pieces: list[bytes] = []
    while length > 0:
        try:
            piece = os.pread(fd, length, offset)
        except OSError as error:
            raise read_error(file, error, offset) from error
        if not piece:
            break
        pieces.append(piece)
        offset += len(piece)
        length -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def fill(fd: int, file: str, offset: int, buffer: memoryview) -> int:
    """Fill a buffer from an open file and return the bytes read before the file ended.

    Raises:
        ResourceError: The system refused the read.
    """
    done = 0
    while done < len(buffer):
        try:
            got = os.preadv(fd, [buffer[done:]], offset + done)
        except OSError as error:
            raise read_error(file, error, offset + done) from error
        if got == 0:
            break
        done += got
    return done


def read_error(file: str, error: OSError, offset: int = 0) -> K3QuantError:
    """Return what a failed system call on a shard means for a person."""
    if error.errno == errno.ENOENT:
        return IncompleteError(f"{file}: expected a file, got none")
    if error.errno == errno.EISDIR:
        return ResourceError(f"{file}: expected a regular file, got a directory")
    return ResourceError(
        f"{file}: expected to read at offset {offset}, got {os.strerror(error.errno or 0).lower()}"
    )


class _Opened:
    """A file descriptor for the length of a `with`."""

    def __init__(self, path: Path, file: str) -> None:
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise read_error(file, error) from error

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def _list_files(root: Path) -> dict[str, FileInfo]:
    files: dict[str, FileInfo] = {}
    for folder, subfolders, names in os.walk(root):
        subfolders.sort()
        place = Path(folder).relative_to(root)
        # A folder that is named like a shard is a fault to report, not a place to look into.
        shardlike = [name for name in subfolders if name.endswith(".safetensors")]
        for name in sorted([*names, *shardlike]):
            try:
                status = (Path(folder) / name).stat()
            except OSError:  # a dangling link, or gone since the listing
                continue
            regular = stat.S_ISREG(status.st_mode)
            files[(place / name).as_posix()] = FileInfo(size=status.st_size, regular=regular)
    return files
