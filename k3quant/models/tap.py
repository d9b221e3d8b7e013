"""Taps hand intermediate tensors out of the blocks, under the names of the golden files."""

from collections.abc import Callable

from torch import Tensor

Tap = Callable[[str, Tensor], None]


def under(tap: Tap | None, prefix: str) -> Tap | None:
    """Return a tap that puts a prefix before every name; None stays None."""
    if tap is None:
        return None
    return lambda name, tensor: tap(prefix + name, tensor)
