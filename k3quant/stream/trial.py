"""Which of several ways to read is the fastest on this disk: each is timed on the run's own ranges.

Past the page cache a range costs no copy and no search for free pages, but some disks, virtual ones
above all, answer the kernel's own read-ahead faster. Neither is known before it was tried.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from threading import Lock


class Way(Enum):
    """How a range that is not in memory is read."""

    THROUGH_CACHE = "through the page cache"
    PAST_CACHE = "past the page cache"


@dataclass(slots=True)
class _Turn:
    """What one way has read so far."""

    handed_out: int = 0
    finished: int = 0
    num_bytes: int = 0
    began: float = 0.0
    rate: float | None = None


class Trial:
    """Hands out ways in turn until each has been timed, and then the fastest.

    A way's turn is three times as many ranges as are read at once. Of those, the middle third is
    timed: before it some of the last way's ranges are still being read, after it the next way's.
    """

    def __init__(
        self,
        ways: Sequence[Way],
        *,
        at_once: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Begin with the first way.

        Args:
            ways: What to try, in this order.
            at_once: Ranges that are read at a time.
            clock: Seconds; asked when a range is finished.
        """
        self._turns = {way: _Turn() for way in ways}
        self._at_once = at_once
        self._clock = clock
        self._lock = Lock()

    def next(self) -> Way:
        """Return how to read the next range."""
        with self._lock:
            for way, turn in self._turns.items():
                if turn.handed_out < 3 * self._at_once:
                    turn.handed_out += 1
                    return way
            # A way whose last ranges are still on their way is not known to be faster.
            return max(self._turns, key=lambda way: self._turns[way].rate or 0.0)

    def finished(self, way: Way, num_bytes: int) -> None:
        """Take notice of a range that was read."""
        with self._lock:
            turn = self._turns[way]
            if turn.rate is not None:
                return
            turn.finished += 1
            if turn.finished == self._at_once:
                turn.began = self._clock()
            elif turn.finished > self._at_once:
                turn.num_bytes += num_bytes
            if turn.finished == 2 * self._at_once:
                turn.rate = turn.num_bytes / max(self._clock() - turn.began, 1e-9)
