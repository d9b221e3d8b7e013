"""Reads what comes next while the caller computes, in order and within a budget of bytes."""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, Protocol, TypeVar


class Unit(Protocol):
    """Something to read, of a known size."""

    @property
    def num_bytes(self) -> int:
        """Bytes that it holds once read."""


U = TypeVar("U", bound=Unit)
V = TypeVar("V")


class Prefetch(Generic[U, V]):
    """An ordered queue of reads in flight.

    Reads are started whenever one is taken, so nothing runs that nobody waits for. One unit may
    exceed the budget: it is then read alone.
    """

    def __init__(
        self,
        units: Iterable[U],
        read: Callable[[U], V],
        *,
        budget_bytes: int,
        threads: int,
        wanted: Callable[[U], bool] = lambda _: True,
    ) -> None:
        """Start reading.

        Args:
            units: What to read, in the order in which it is taken.
            read: Reads one unit; called from several threads.
            budget_bytes: Bound of what is in flight or waits to be taken.
            threads: Reads at a time.
            wanted: Asked before a unit is read and again before it is handed out; what is no
                longer wanted is left out.
        """
        self._units = iter(units)
        self._put_back: U | None = None
        self._read = read
        self._wanted = wanted
        self._budget = budget_bytes
        self._held = 0
        self._queue: deque[tuple[U, Future[V]]] = deque()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="k3quant-read")
        self._start_reads()

    def __enter__(self) -> "Prefetch[U, V]":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def take(self) -> tuple[U, V]:
        """Return the next wanted unit with what was read.

        Raises:
            LookupError: Nothing is left.
            K3QuantError: The read failed.
        """
        self._start_reads()
        while self._queue:
            unit, future = self._queue.popleft()
            self._held -= unit.num_bytes
            if not self._wanted(unit):
                future.cancel()
                self._start_reads()
                continue
            value = future.result()
            self._start_reads()
            return unit, value
        raise LookupError("prefetch: nothing left to take")

    def close(self) -> None:
        """Drop what waits and end the threads; a read in progress is waited for."""
        self._queue.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _start_reads(self) -> None:
        while (unit := self._next_unit()) is not None:
            if not self._wanted(unit):
                continue
            if self._queue and self._held + unit.num_bytes > self._budget:
                self._put_back = unit
                return
            self._held += unit.num_bytes
            self._queue.append((unit, self._pool.submit(self._read, unit)))

    def _next_unit(self) -> U | None:
        unit, self._put_back = self._put_back, None
        return next(self._units, None) if unit is None else unit
