"""Buffers that a worker reuses, and the one loop that copies a tensor through them."""

import threading
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from k3quant.checkpoint.reader import Checkpoint
from k3quant.convert.export_plan import Write

Array = npt.NDArray[np.generic]

_COPY_BYTES = 8 << 20
_LOCAL = threading.local()


@dataclass(slots=True)
class Scratch:
    """Buffers that one worker reuses: a new large array costs more than the cast that fills it."""

    _buffers: dict[str, Array] = field(default_factory=dict)

    def array(self, key: str, shape: tuple[int, ...], dtype: type[np.generic]) -> Array:
        """Return an uninitialised array; its content lives until the key is asked for again."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        raw = self._buffers.get(key)
        if raw is None or raw.nbytes < size:
            raw = self._buffers[key] = np.empty(size, np.uint8)
        return raw[:size].view(dtype).reshape(shape)


def scratch() -> Scratch:
    """Return the calling thread's buffers."""
    found: Scratch | None = getattr(_LOCAL, "scratch", None)
    if found is None:
        found = _LOCAL.scratch = Scratch()
    return found


def copy_bytes(
    checkpoint: Checkpoint,
    source: str,
    write: Write,
    *,
    target: str,
    offset: int = 0,
    length: int | None = None,
) -> None:
    """Copy a tensor, or its first bytes, in bounded pieces.

    Args:
        checkpoint: Where it lies.
        source: Its name.
        write: The output.
        target: Output tensor.
        offset: First byte in the output tensor.
        length: Bytes to copy; None means all.
    """
    length = checkpoint.entry(source).length if length is None else length
    for begin in range(0, length, _COPY_BYTES):
        piece = scratch().array("copy", (min(_COPY_BYTES, length - begin),), np.uint8)
        checkpoint.read_into(source, piece, offset=begin)  # type: ignore[arg-type]
        write(target, offset + begin, piece)
