"""A file that is being fetched: `NAME.partial`, and beside it which of its pieces have arrived.

A piece counts only once its last byte was written, so that any process can go on where another
was killed. What the disk lost beneath that is found by the digest of the whole file.
"""

import math
import os
from contextlib import suppress
from pathlib import Path

import msgspec

from k3quant.checkpoint.output_file import PARTIAL_SUFFIX, write_error
from k3quant.hub.content import Content

STATE_SUFFIX = ".json"
FRESH_SUFFIX = ".new"


class PartialState(msgspec.Struct, kw_only=True):
    """What the file beside a partial one holds; `done` are pieces, first and one past the last."""

    commit: str
    etag: str | None
    bytes: int
    piece_bytes: int
    done: list[tuple[int, int]]


_DECODER = msgspec.json.Decoder(PartialState)


def partial_path(path: Path) -> Path:
    """Return where a file grows."""
    return path.with_name(path.name + PARTIAL_SUFFIX)


def state_path(path: Path) -> Path:
    """Return where the state of a growing file lies."""
    return path.with_name(path.name + PARTIAL_SUFFIX + STATE_SUFFIX)


class Partial:
    """The pieces of one file that have arrived, on disk.

    Args:
        path: The file's final path.
        content: What it is made from.
        commit: Commit of the listing.
        piece_bytes: Size of a piece, unless the file was begun with another.
    """

    def __init__(self, path: Path, content: Content, *, commit: str, piece_bytes: int) -> None:
        self.path = path
        self.content = content
        self.commit = commit
        state = _load(path, content, commit)
        self.piece_bytes = state.piece_bytes if state else piece_bytes
        self.done = [False] * math.ceil(content.size / self.piece_bytes)
        there = _size(partial_path(path))
        for first, end in state.done if state else []:
            for piece in range(max(first, 0), min(end, len(self.done))):
                self.done[piece] = self.end_of(piece) <= there

    @property
    def done_bytes(self) -> int:
        """Bytes of the pieces that have arrived."""
        return sum(self.end_of(i) - self.begin_of(i) for i, done in enumerate(self.done) if done)

    def begin_of(self, piece: int) -> int:
        """Return a piece's first byte."""
        return piece * self.piece_bytes

    def end_of(self, piece: int) -> int:
        """Return the byte after a piece's last."""
        return min((piece + 1) * self.piece_bytes, self.content.size)

    def open(self) -> int:
        """Open the growing file and return its descriptor.

        Raises:
            ResourceError: The system refused.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            return os.open(partial_path(self.path), flags, 0o666)
        except OSError as error:
            raise write_error(self.path, error, need=self.content.size) from error

    def save(self) -> None:
        """Write down which pieces have arrived.

        Raises:
            ResourceError: The system refused.
        """
        state = PartialState(
            commit=self.commit,
            etag=self.content.etag,
            bytes=self.content.size,
            piece_bytes=self.piece_bytes,
            done=_runs(self.done),
        )
        place = state_path(self.path)
        fresh = place.with_name(place.name + FRESH_SUFFIX)
        try:
            fresh.write_bytes(msgspec.json.encode(state))
            fresh.replace(place)
        except OSError as error:
            raise write_error(place, error, need=self.content.size) from error

    def discard(self) -> None:
        """Remove the growing file and its state."""
        self.done = [False] * len(self.done)
        discard(self.path)


def discard(path: Path) -> None:
    """Remove what was begun of a file, if anything."""
    state = state_path(path)
    for leftover in (partial_path(path), state, state.with_name(state.name + FRESH_SUFFIX)):
        with suppress(FileNotFoundError):
            leftover.unlink()


def _load(path: Path, content: Content, commit: str) -> PartialState | None:
    try:
        state = _DECODER.decode(state_path(path).read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    same_bytes = state.etag == content.etag and state.bytes == content.size
    # Without a digest only the same commit says that the bytes are the same.
    sound = state.piece_bytes > 0 and (content.etag is not None or state.commit == commit)
    return state if same_bytes and sound else None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _runs(done: list[bool]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for piece, arrived in enumerate(done):
        if not arrived:
            continue
        if runs and runs[-1][1] == piece:
            runs[-1] = (runs[-1][0], piece + 1)
        else:
            runs.append((piece, piece + 1))
    return runs
