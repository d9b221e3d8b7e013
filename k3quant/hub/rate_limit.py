"""A ceiling on bytes per second, shared by all connections."""

import time
from threading import Event, Lock

from k3quant.hub.patience import StoppedError


class RateLimit:
    """Delays whoever spends bytes faster than allowed.

    Args:
        bytes_per_second: The ceiling; None sets none.
        stop: Ends a delay early.
    """

    def __init__(self, bytes_per_second: int | None, stop: Event) -> None:
        self._rate = bytes_per_second
        self._stop = stop
        self._lock = Lock()
        self._free_at = 0.0

    def spend(self, count: int) -> None:
        """Wait until `count` more bytes are within the ceiling.

        Raises:
            StoppedError: The work was told to stop meanwhile.
        """
        if self._rate is None:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(now, self._free_at) + count / self._rate
            delay = self._free_at - now
        if self._stop.wait(delay):
            raise StoppedError
