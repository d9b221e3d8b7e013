"""Threads that fill arenas on a device while it computes.

Threads take pieces of files and copy them on one stream of their own. An arena is filled again only
when the device has finished with it, so the number of arenas is the whole back-pressure.
"""

import os
import sys
import threading
from collections import deque
from collections.abc import Iterable
from contextlib import nullcontext
from queue import SimpleQueue
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from k3quant.stream.chunks import Chunk, Piece
from k3quant.stream.files import OpenFiles
from k3quant.stream.transfer import Lane


class Origin(Protocol):
    """Where pieces come from."""

    @property
    def files(self) -> OpenFiles:
        """The files, which the reader closes."""

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Read bytes of one tensor; asked only for what could not be read quickly."""

    def count(self, length: int) -> None:
        """Take notice of bytes that were read."""


NICENESS = 10
"""Of the threads that read: what starts the device's work comes first where cores are scarce."""


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


class ChunkReader:
    """Loads chunks in order, each into a free arena of its kind."""

    def __init__(
        self,
        chunks: Iterable[Chunk],
        origin: Origin,
        *,
        device: torch.device,
        own_arenas: int,
        own_bytes: int,
        expert_arenas: int,
        expert_bytes: int,
        threads: int,
    ) -> None:
        """Start reading.

        Args:
            chunks: What to load, in the order in which it is taken; asked for from a thread.
            origin: Where pieces are read; called from several threads.
            device: Where to.
            own_arenas: Arenas for layers' own tensors.
            own_bytes: Bytes of each.
            expert_arenas: Arenas for experts.
            expert_bytes: Bytes of each.
            threads: Reads at a time.
        """
        self._chunks = chunks
        self._origin = origin
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
        self._threads = [
            threading.Thread(target=self._fill, name="k3quant-read") for _ in range(threads)
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
        self._origin.files.close()

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

    def _fill(self) -> None:
        if self._stream is not None:
            _give_way()
        lane: Lane | None = None
        while (job := self._work.get()) is not None:
            loaded, piece = job
            try:
                if self._closing or self._fault is not None:
                    loaded.done.set()
                    continue
                lane = lane or Lane(self._device, self._stream)
                self._load(loaded, piece, lane)
            except BaseException as error:
                self._fail(error)
                loaded.done.set()

    def _load(self, loaded: Loaded, piece: Piece, lane: Lane) -> None:
        if self._stream is not None and loaded.arena.free is not None:
            self._stream.wait_event(loaded.arena.free)
        read = self._origin.files.begin(piece.file, piece.offset, piece.length)
        done = lane.transfer(read.fd, piece.offset, piece.length, piece.parts, loaded.data)
        self._origin.files.end(read)
        if done < piece.length:
            self._load_slowly(loaded, piece, done)
        self._origin.count(piece.length)
        with self._more:
            loaded.missing -= 1
            last = not loaded.missing
            if last and self._stream is not None:
                loaded.ready = self._stream.record_event()
        if last:
            loaded.done.set()

    def _load_slowly(self, loaded: Loaded, piece: Piece, done: int) -> None:
        """Read the rest of a piece, tensor by tensor, in a way that says which cannot be read.

        Perhaps nothing is wrong any more.
        """
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            for start, length, to in piece.parts:
                skip = max(0, done - start)
                if skip < length:
                    rest = np.empty(length - skip, dtype=np.uint8)
                    place = piece.offset + start + skip
                    self._origin.read_into(piece.file, place, memoryview(rest.data))
                    loaded.data[to + skip : to + length].copy_(torch.from_numpy(rest))

    def _fail(self, error: BaseException) -> None:
        with self._more:
            self._fault = self._fault or error
            self._more.notify_all()


def _give_way() -> None:
    """Lower the calling thread's priority, which Linux keeps for each thread."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
