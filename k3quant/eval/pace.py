"""How fast a walk goes, in words for a progress bar."""

import time
from collections.abc import Callable


class Pace:
    """The rate of one walk through the layers."""

    def __init__(
        self, *, tokens: int, layers: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Start the clock.

        Args:
            tokens: Tokens that walk together.
            layers: Layers they have before them.
            clock: Tells the seconds.
        """
        self._tokens = tokens
        self._layers = layers
        self._clock = clock
        self._began = clock()
        self._first: tuple[int, int] | None = None

    def note(self, layer: int, *, bytes_read: int) -> str:
        """Return what to show while a layer runs.

        Args:
            layer: 0-based layer.
            bytes_read: Bytes read since the model was opened.
        """
        if self._first is None:
            self._first = layer, bytes_read
        done, read = layer - self._first[0], bytes_read - self._first[1]
        seconds = self._clock() - self._began
        if not done or seconds <= 0:
            return f"layer {layer}"
        # A token is through when all its layers are.
        tokens = self._tokens * done / self._layers / seconds
        return f"layer {layer}, {read / seconds / 1e9:.2f} GB/s, {tokens:,.0f} tokens/s"
