"""Digests of a file's bytes against everything that is known about them."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from k3quant.checkpoint.folder import read_error
from k3quant.hub.patience import StoppedError

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherHead:
    """A file of another head than the one whose digest is known: the rest of both is the same.

    Attributes:
        head: The known file's first bytes.
        replaced: How many bytes of this file stand in their place.
        sha256: Digest of the known file.
    """

    head: bytes
    replaced: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a file's bytes must be, as far as is known.

    Attributes:
        size: Bytes.
        sha256: Digest of the file.
        blob_id: Git's object id (sha1 of the length and the bytes), used without a sha256.
        other_head: A file that differs in its head alone, used without either.
    """

    size: int
    sha256: str | None = None
    blob_id: str | None = None
    other_head: OtherHead | None = None


@dataclass(frozen=True, slots=True)
class Proof:
    """Digest of a file, and what proves it: `sha256`, `git`, `source`, or its `size` alone."""

    sha256: str
    by: str


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Two digests that should be one."""

    expected: str
    got: str


class Digest:
    """Computes what a file is known by, from its bytes in order."""

    def __init__(self, expected: Expected) -> None:
        self._expected = expected
        self._sha256 = hashlib.sha256()
        self._blob = None
        self._source = None
        self._to_skip = 0
        if expected.sha256 is not None:
            return
        if expected.blob_id is not None:
            self._blob = hashlib.sha1(b"blob %d\0" % expected.size, usedforsecurity=False)
        elif expected.other_head is not None:
            self._source = hashlib.sha256(expected.other_head.head)
            self._to_skip = expected.other_head.replaced

    def update(self, data: bytes | memoryview) -> None:
        """Add the next bytes."""
        self._sha256.update(data)
        if self._blob is not None:
            self._blob.update(data)
        if self._source is not None:
            self._source.update(data[self._to_skip :])
            self._to_skip = max(self._to_skip - len(data), 0)

    def judge(self) -> Proof | Mismatch:
        """Compare, after the last byte."""
        sha256, expected = self._sha256.hexdigest(), self._expected
        known, got, by = expected.sha256, sha256, "sha256"
        if self._blob is not None:
            known, got, by = expected.blob_id, self._blob.hexdigest(), "git"
        elif self._source is not None and expected.other_head is not None:
            known, got, by = expected.other_head.sha256, self._source.hexdigest(), "source"
        if known is None:
            return Proof(sha256, "size")
        return Proof(sha256, by) if got == known else Mismatch(known, got)


def judge_bytes(data: bytes, expected: Expected) -> Proof | Mismatch:
    """Compare a whole file in memory."""
    digest = Digest(expected)
    digest.update(data)
    return digest.judge()


def hash_file(
    path: Path, expected: Expected, *, stop: Event, told: Callable[[int], None]
) -> Proof | Mismatch:
    """Read a file of the right size once and compare its digest.

    Args:
        path: The file.
        expected: What it must be.
        stop: Ends the reading early.
        told: Called with each number of bytes read.

    Raises:
        ResourceError: The system refused a read.
        IncompleteError: The file is gone.
        StoppedError: The work was told to stop.
    """
    digest = Digest(expected)
    buffer = memoryview(bytearray(_CHUNK))
    try:
        with path.open("rb", buffering=0) as file:
            while got := os.readv(file.fileno(), [buffer]):
                digest.update(buffer[:got])
                told(got)
                if stop.is_set():
                    raise StoppedError
    except OSError as error:
        raise read_error(path.name, error) from error
    return digest.judge()
