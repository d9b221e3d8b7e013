"""One file on its way: its pieces, whoever fetches them, and its digest in order of the bytes.

A connection begins at the first free piece and goes on from piece to piece, hashing as bytes
arrive. Others that have nothing else to do take pieces further on; those are hashed by reading
them back once the digest gets there.
"""

import os
from collections.abc import Callable
from contextlib import closing
from enum import Enum
from pathlib import Path
from threading import Event, Lock

from k3quant.checkpoint.folder import fill
from k3quant.checkpoint.output_file import sync_folder, write_all, write_error
from k3quant.checkpoint.page_cache import start_writeback
from k3quant.errors import HashError
from k3quant.hub.digest import Digest, Expected, Mismatch, Proof
from k3quant.hub.partial import Partial, discard, partial_path
from k3quant.hub.patience import StoppedError

_READ_BACK = 1 << 20
_WRITEBACK = 8 << 20
_ATTEMPTS = 2  # a resumed or mangled file is fetched once more from its start


class _Piece(Enum):
    FREE = 0
    TAKEN = 1
    DONE = 2


class FileTransfer:
    """Fetches one file; all methods may be called from any thread.

    Args:
        partial: What has arrived of it.
        expected: What its bytes must be.
        told: Called with each number of bytes that arrived, negative where they are dropped.
        stop: Ends the work early.
    """

    def __init__(
        self, partial: Partial, expected: Expected, *, told: Callable[[int], None], stop: Event
    ) -> None:
        self.partial = partial
        self.expected = expected
        self.content = partial.content
        self.proof: Proof | None = None
        self.over = False
        self._told = told
        self._stop = stop
        self._lock = Lock()
        self._fd = -1
        self._attempts = 0
        self._pieces: list[_Piece] = []
        self._digest = Digest(expected)
        self._hashed = 0
        self._hashing = False

    @property
    def path(self) -> Path:
        """The final path."""
        return self.partial.path

    @property
    def num_free(self) -> int:
        """Pieces that nobody has taken."""
        return self._pieces.count(_Piece.FREE)

    def begin(self) -> None:
        """Open the file and hash what is there of it.

        Raises:
            HashError: Everything was there, and is not what it must be.
            ResourceError: The system refused.
            StoppedError: The work was told to stop.
        """
        self._fd = self.partial.open()
        self._pieces = [_Piece.DONE if done else _Piece.FREE for done in self.partial.done]
        self._catch_up()

    def end(self) -> None:
        """Close the file, finished or not, once nobody is at work on it."""
        with self._lock:
            self.over = True
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def claim_first(self) -> int | None:
        """Take the first free piece; None where there is none."""
        with self._lock:
            if self.over or _Piece.FREE not in self._pieces:
                return None
            return self._take(self._pieces.index(_Piece.FREE))

    def claim_far(self) -> int | None:
        """Take the piece in the middle of the longest free run, to leave its owner the rest.

        A single piece is left to its owner, who has asked for it already.
        """
        with self._lock:
            if self.over:
                return None
            best, length, begin = 0, 0, 0
            for piece, state in enumerate([*self._pieces, _Piece.DONE]):
                if state is _Piece.FREE:
                    continue
                if piece - begin > length:
                    best, length = begin, piece - begin
                begin = piece + 1
            return self._take(best + length // 2) if length > 1 else None

    def fetch(self, piece: int) -> None:
        """Fetch a taken piece and those after it, as long as they are free.

        Raises:
            HashError: The file is whole and, for the second time, not what it must be.
            IncompleteError: The server has lost the file.
            RefusedError: The server's file is not the listing's.
            ResourceError: The server or the disk failed.
            UsageError: Access is denied.
            StoppedError: The work was told to stop.
        """
        offset, until = self.partial.begin_of(piece), self._end_of_free_run(piece)
        piece_end = self.partial.end_of(piece)
        in_order = self._claim_digest(offset)
        with closing(self.content.stream(offset, until)) as chunks:
            for chunk in chunks:
                view = memoryview(chunk)
                while view:
                    part = view[: piece_end - offset]
                    self._write(offset, part)
                    if in_order:
                        self._digest.update(part)
                    offset += len(part)
                    view = view[len(part) :]
                    self._told(len(part))
                    if offset < piece_end:
                        continue
                    self._arrived(piece, hashed=in_order)
                    piece += 1
                    if offset == until:
                        break  # and let the stream end, so that its connection is kept
                    if not self._claim(piece):
                        return
                    piece_end = self.partial.end_of(piece)
                    in_order = self._claim_digest(offset)

    def _take(self, piece: int) -> int:
        self._pieces[piece] = _Piece.TAKEN
        return piece

    def _claim(self, piece: int) -> bool:
        with self._lock:
            if self.over or self._pieces[piece] is not _Piece.FREE:
                return False
            self._take(piece)
            return True

    def _end_of_free_run(self, piece: int) -> int:
        with self._lock:
            following = piece + 1
            while following < len(self._pieces) and self._pieces[following] is _Piece.FREE:
                following += 1
            return self.partial.end_of(following - 1)

    def _write(self, offset: int, view: memoryview) -> None:
        try:
            write_all(self._fd, offset, view)
        except OSError as error:
            raise write_error(self.path, error, need=self.content.size) from error
        border = (offset + len(view)) // _WRITEBACK * _WRITEBACK
        if border > offset:  # or the sync at the end of a piece waits for all of it
            start_writeback(self._fd, border - _WRITEBACK, _WRITEBACK)

    def _claim_digest(self, offset: int) -> bool:
        with self._lock:
            if self._hashing or self._hashed != offset:
                return False
            self._hashing = True
            return True

    def _arrived(self, piece: int, *, hashed: bool) -> None:
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise write_error(self.path, error, need=self.content.size) from error
        with self._lock:
            self._pieces[piece] = _Piece.DONE
            self.partial.done[piece] = True
            if len(self._pieces) > 1:
                self.partial.save()
            if hashed:
                self._hashed = self.partial.end_of(piece)
                self._hashing = False
        self._catch_up()

    def _catch_up(self) -> None:
        """Hash what has arrived beyond the digest, unless another thread is at it."""
        while True:
            with self._lock:
                if self._hashing or self.over:
                    return
                begin, end = self._hashed, self._end_of_arrived()
                if begin == end == self.content.size:
                    self.over = True
                    break
                if begin == end:
                    return
                self._hashing = True
            self._read_back(begin, end)
            with self._lock:
                self._hashed = end
                self._hashing = False
        self._finish()

    def _end_of_arrived(self) -> int:
        piece = self._hashed // self.partial.piece_bytes
        while piece < len(self._pieces) and self._pieces[piece] is _Piece.DONE:
            piece += 1
        return min(piece * self.partial.piece_bytes, self.content.size)

    def _read_back(self, begin: int, end: int) -> None:
        buffer = memoryview(bytearray(min(_READ_BACK, end - begin)))
        while begin < end:
            if self._stop.is_set():
                raise StoppedError
            view = buffer[: end - begin]
            got = fill(self._fd, partial_path(self.path).name, begin, view)
            if got == 0:
                # The disk lost what was written; the digest will say so.
                return
            self._digest.update(view[:got])
            begin += got

    def _finish(self) -> None:
        verdict = self._digest.judge()
        if isinstance(verdict, Mismatch):
            self._restart(verdict)
            return
        try:
            os.ftruncate(self._fd, self.content.size)
            os.fsync(self._fd)
            os.close(self._fd)
            self._fd = -1
            partial_path(self.path).replace(self.path)
            sync_folder(self.path.parent)
        except OSError as error:
            raise write_error(self.path, error, need=self.content.size) from error
        discard(self.path)
        self.proof = verdict

    def _restart(self, mismatch: Mismatch) -> None:
        self._attempts += 1
        os.close(self._fd)
        self._fd = -1
        self.partial.discard()
        if self._attempts >= _ATTEMPTS:
            raise HashError(
                f"{self.content.name}: expected {mismatch.expected}, got {mismatch.got}, "
                f"{self._attempts} times",
                hint="the server, or something on the way, changes bytes; try another endpoint",
            )
        self._told(-self.content.size)
        with self._lock:
            self._fd = self.partial.open()
            self._digest = Digest(self.expected)
            self._hashed = 0
            self._pieces = [_Piece.FREE] * len(self._pieces)
            self.over = False
