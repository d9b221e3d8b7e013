"""Threads that fill arenas on a device while it computes.

A piece of a file is read into a staging buffer of its thread, pinned for a GPU, and copied from
there on a stream of its own. An arena is filled again only when the device has finished with it,
so the number of arenas is the whole back-pressure.
"""

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from k3quant.stream.chunks import Chunk, Piece

SWITCH_SECONDS = 0.0005
"""How long a thread may compute in Python while others wait: planning must not hold up reads."""

Read = Callable[[Piece, npt.NDArray[np.uint8]], None]


class Arena:
    """Bytes on the device that one chunk fills at a time."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.data = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.free: torch.cuda.Event | None = None  # after which it may be filled again


class Loaded:
    """A chunk in its arena.

    Attributes:
        chunk: What it is.
        data: The arena's bytes.
    """

    def __init__(self, chunk: Chunk, arena: Arena) -> None:
        self.chunk = chunk
        self.data = arena.data
        self.arena = arena
        self.missing = len(chunk.pieces)
        self.done = threading.Event()
        self.ready: torch.cuda.Event | None = None
        if not self.missing:
            self.done.set()

    def view(self, start: int, length: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """View bytes of the arena as a tensor."""
        return self.data[start : start + length].view(dtype).view(shape)


class _Turns:
    """The interpreter's switch interval, short while any reader is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers = 0
        self._before = 0.0

    def shorten(self) -> None:
        with self._lock:
            if not self._readers:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(SWITCH_SECONDS)
            self._readers += 1

    def restore(self) -> None:
        with self._lock:
            self._readers -= 1
            if not self._readers:
                sys.setswitchinterval(self._before)


_TURNS = _Turns()


class ChunkReader:
    """Loads chunks in order, each into a free arena of its kind."""

    def __init__(
        self,
        chunks: Iterable[Chunk],
        read: Read,
        *,
        device: torch.device,
        own_arenas: int,
        own_bytes: int,
        expert_arenas: int,
        expert_bytes: int,
        piece_bytes: int,
        threads: int,
    ) -> None:
        """Start reading.

        Args:
            chunks: What to load, in the order in which it is taken; asked for from a thread.
            read: Fills a buffer with a piece's bytes; called from several threads.
            device: Where to.
            own_arenas: Arenas for layers' own tensors.
            own_bytes: Bytes of each.
            expert_arenas: Arenas for experts.
            expert_bytes: Bytes of each.
            piece_bytes: The largest piece.
            threads: Reads at a time.
        """
        self._chunks = chunks
        self._read = read
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._free: dict[bool, SimpleQueue[Arena | None]] = {}
        for is_own, count, size in (
            (True, own_arenas, own_bytes),
            (False, expert_arenas, expert_bytes),
        ):
            self._free[is_own] = SimpleQueue()
            for _ in range(count):
                self._free[is_own].put(Arena(size, device))
        self._work: SimpleQueue[tuple[Loaded, Piece] | None] = SimpleQueue()
        self._ahead: deque[Loaded] = deque()
        self._more = threading.Condition()
        self._planned_all = False
        self._closing = False
        self._fault: BaseException | None = None
        _TURNS.shorten()
        self._threads = [
            threading.Thread(target=self._fill, args=(piece_bytes,), name="k3quant-read")
            for _ in range(threads)
        ]
        self._threads.append(threading.Thread(target=self._plan, name="k3quant-plan"))
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def take(self) -> Loaded:
        """Return the next chunk once the device may use it.

        Raises:
            K3QuantError: A read failed.
            ValueError: There is none.
        """
        with self._more:
            self._more.wait_for(lambda: self._ahead or self._fault or self._planned_all)
            if self._fault is None and not self._ahead:
                raise ValueError("chunks: expected another one, got the end")
            loaded = self._ahead.popleft() if self._ahead else None
        if self._fault is not None or loaded is None:
            raise self._fault or ValueError("chunks: expected another one, got none")
        loaded.done.wait()
        if self._fault is not None:
            raise self._fault
        if loaded.ready is not None:
            torch.cuda.current_stream(self._device).wait_event(loaded.ready)
        return loaded

    def release(self, loaded: Loaded) -> None:
        """Give a chunk's arena back; what was started on the device still sees its bytes."""
        if self._stream is not None:
            loaded.arena.free = torch.cuda.current_stream(self._device).record_event()
        self._free[not loaded.chunk.experts].put(loaded.arena)

    def close(self) -> None:
        """End the threads; reads in progress are waited for."""
        self._closing = True
        for queue in self._free.values():
            queue.put(None)
        self._threads[-1].join()
        for _ in self._threads[:-1]:
            self._work.put(None)
        for thread in self._threads[:-1]:
            thread.join()
        if self._stream is not None:
            self._stream.synchronize()
        self._free.clear()  # and with it the arenas
        self._ahead.clear()
        _TURNS.restore()

    def _plan(self) -> None:
        try:
            for chunk in self._chunks:
                arena = self._free[not chunk.experts].get()
                if arena is None or self._closing:
                    return
                if chunk.num_bytes > arena.data.numel():
                    raise ValueError(
                        f"arena: expected {chunk.num_bytes} bytes, got {arena.data.numel()}"
                    )
                loaded = Loaded(chunk, arena)
                with self._more:
                    self._ahead.append(loaded)
                    self._more.notify_all()
                for piece in chunk.pieces:
                    self._work.put((loaded, piece))
        except BaseException as error:
            self._fail(error)
        finally:
            with self._more:
                self._planned_all = True
                self._more.notify_all()

    def _fill(self, piece_bytes: int) -> None:
        staging: Iterator[_Staged] | None = None
        while (job := self._work.get()) is not None:
            loaded, piece = job
            try:
                if self._closing or self._fault is not None:
                    loaded.done.set()
                    continue
                if staging is None:
                    staging = _staging(piece_bytes, pinned=self._stream is not None)
                self._load(loaded, piece, next(staging))
            except BaseException as error:
                self._fail(error)
                loaded.done.set()

    def _load(self, loaded: Loaded, piece: Piece, staged: "_Staged") -> None:
        staged.wait()
        self._read(piece, staged.array[: piece.length])
        if self._stream is None:
            self._copy(loaded, piece, staged.tensor)
        else:
            with torch.cuda.stream(self._stream):
                if loaded.arena.free is not None:
                    self._stream.wait_event(loaded.arena.free)
                self._copy(loaded, piece, staged.tensor)
                staged.copied = self._stream.record_event()
        with self._more:
            loaded.missing -= 1
            last = not loaded.missing
            if last and self._stream is not None:
                loaded.ready = self._stream.record_event()
        if last:
            loaded.done.set()

    @staticmethod
    def _copy(loaded: Loaded, piece: Piece, staged: Tensor) -> None:
        # One call for all parts: each would take the interpreter's lock, which all threads share.
        parts = torch.split(staged[: piece.length], [length for _, length, _ in piece.parts])
        places = [loaded.data.narrow(0, to, length) for _, length, to in piece.parts]
        torch._foreach_copy_(places, parts, non_blocking=True)

    def _fail(self, error: BaseException) -> None:
        with self._more:
            self._fault = self._fault or error
            self._more.notify_all()


class _Staged:
    """A staging buffer of one thread."""

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        self.tensor = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        self.array = self.tensor.numpy()
        self.copied: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Wait until the device has taken what the buffer held."""
        if self.copied is not None:
            self.copied.synchronize()


def _staging(num_bytes: int, *, pinned: bool) -> Iterator[_Staged]:
    """Yield two buffers in turn: one is read into while the other is copied."""
    both = [_Staged(num_bytes, pinned=pinned) for _ in range(2)]
    while True:
        yield from both
