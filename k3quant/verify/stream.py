"""One pass over a shard's bytes, shared by its digest and its values."""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from k3quant.checkpoint.folder import Source
from k3quant.errors import IncompleteError, K3QuantError
from k3quant.report import Finding, finding_of
from k3quant.verify.stats import TensorStats
from k3quant.verify.values import Bytes, TensorValues, ValueCheck

CHUNK_BYTES = 4 << 20

StatsSink = Callable[[str, dict[str, Any]], None]
"""Receives a tensor's name and statistics; called from several threads."""


class Span(NamedTuple):
    """A tensor's bytes in its file, and what to check of them."""

    begin: int
    end: int
    check: ValueCheck


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPass:
    """What one pass found.

    Attributes:
        file: The file.
        sha256: Its digest, None where it was not asked for or the read failed.
        findings: Bad values, or why the read failed.
        remembered: Whether the record of proven files answered instead of a read.
    """

    file: str
    sha256: str | None
    findings: tuple[Finding, ...]
    remembered: bool = False


def stream_shard(
    source: Source,
    file: str,
    *,
    spans: Sequence[Span],
    hashed: bool,
    advance: Callable[[int], None],
    stats: StatsSink | None = None,
) -> ShardPass:
    """Read a file once from start to end.

    Args:
        source: The checkpoint's files.
        file: The file.
        spans: Tensors to check, ordered by `begin`; they do not overlap.
        hashed: Whether to compute its sha256.
        advance: Told the bytes of each piece.
        stats: Given each tensor's name and statistics, where they are wanted.

    Returns:
        Digest and findings; a failed or short read is a finding, never an exception.
    """
    digest = hashlib.sha256() if hashed else None
    reader = _SpanReader(spans, stats)
    try:
        for offset, piece in _pieces(source, file):
            if digest is not None:
                digest.update(piece.data)
            reader.add(offset, piece)
            advance(piece.size)
    except IncompleteError as error:
        return _failed(file, error, "short-read")
    except K3QuantError as error:
        return _failed(file, error, "read")
    return ShardPass(
        file=file,
        sha256=digest.hexdigest() if digest is not None else None,
        findings=tuple(reader.findings),
    )


def hash_file(source: Source, file: str, *, advance: Callable[[int], None] = lambda _: None) -> str:
    """Return a file's sha256 in hex.

    Args:
        source: The checkpoint's files.
        file: The file.
        advance: Told the bytes of each piece.

    Raises:
        IncompleteError: The file is gone, or ends too early.
        ResourceError: The system refused the read.
    """
    digest = hashlib.sha256()
    for _, piece in _pieces(source, file):
        digest.update(piece.data)
        advance(piece.size)
    return digest.hexdigest()


def _pieces(source: Source, file: str) -> Iterator[tuple[int, Bytes]]:
    """Yield a file's bytes from start to end with their offsets; each piece in the same buffer."""
    size = source.files[file].size
    buffer = np.empty(min(CHUNK_BYTES, max(size, 1)), dtype=np.uint8)
    for offset in range(0, size, CHUNK_BYTES):
        piece = buffer[: min(CHUNK_BYTES, size - offset)]
        source.read_into(file, offset, memoryview(piece.data))
        yield offset, piece


class _SpanReader:
    """Cuts a file's pieces at tensor borders and hands whole elements on."""

    def __init__(self, spans: Sequence[Span], sink: StatsSink | None) -> None:
        self._spans = spans
        self._sink = sink
        self._stats: TensorStats | None = None
        self._next = 0
        self._values: TensorValues | None = None
        self._rest: Bytes | None = None
        self.findings: list[Finding] = []

    def add(self, start: int, piece: Bytes) -> None:
        """Look at the bytes of a file from `start` on."""
        end = start + piece.size
        while self._next < len(self._spans):
            span = self._spans[self._next]
            if span.begin >= end:
                return
            if self._values is None:
                self._values = TensorValues(span.check)
                self._stats = TensorStats(span.check) if self._sink else None
            self._hand_on(piece[max(span.begin - start, 0) : span.end - start], span.end <= end)
            if span.end > end:
                return
            self.findings += self._values.findings()
            if self._sink is not None and self._stats is not None:
                self._sink(span.check.name, self._stats.to_json())
            self._values, self._rest = None, None
            self._next += 1

    def _hand_on(self, part: Bytes, last: bool) -> None:
        assert self._values is not None
        if self._rest is not None:
            part = np.concatenate([self._rest, part])
            self._rest = None
        whole = part.size if last else part.size // 8 * 8
        if whole < part.size:  # an element may be cut here; eight bytes hold any
            self._rest = part[whole:].copy()
        self._values.add(part[:whole])
        if self._stats is not None:
            self._stats.add(part[:whole])


def _failed(file: str, error: K3QuantError, code: str) -> ShardPass:
    return ShardPass(file=file, sha256=None, findings=(finding_of(error, subject=file, code=code),))


def default_jobs() -> int:
    """Return the processors this process may use."""
    return len(os.sched_getaffinity(0))
