"""Whether two checkpoints hold the same tensors, whatever files they lie in."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from k3quant.checkpoint.reader import Checkpoint
from k3quant.progress import SILENT, Progress

Bytes = npt.NDArray[np.uint8]

_PIECE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorChange:
    """One tensor that differs: what of it, before and after."""

    name: str
    what: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorComparison:
    """What a comparison found.

    Attributes:
        changes: Tensors that differ.
        tensors: Tensors that both hold, bit for bit.
        tensor_bytes: Their bytes.
        same_files: Whether every tensor lies in a file of the same name.
    """

    changes: tuple[TensorChange, ...]
    tensors: int
    tensor_bytes: int
    same_files: bool


def compare_tensors(
    before: Checkpoint, after: Checkpoint, progress: Progress = SILENT
) -> TensorComparison:
    """Compare names, dtypes, shapes and every byte of two checkpoints' tensors.

    Args:
        before: The one.
        after: The other.
        progress: Told the bytes compared.

    Raises:
        IncompleteError: A file ends too early.
        ResourceError: The system refused a read.
    """
    changes: list[TensorChange] = []
    tensors = tensor_bytes = 0
    same_files = True
    progress.start("compare", sum(entry.length for entry in before.entries.values()), "B")
    buffers = [np.empty(_PIECE_BYTES, np.uint8) for _ in range(2)]
    for name in sorted(before.entries.keys() | after.entries.keys()):
        ours, theirs = before.entries.get(name), after.entries.get(name)
        if ours is None or theirs is None:
            there = ["absent" if entry is None else "present" for entry in (ours, theirs)]
            changes.append(TensorChange(name=name, what="tensor", before=there[0], after=there[1]))
            continue
        same_files &= ours.file == theirs.file
        kinds = [f"{entry.dtype} {list(entry.shape)}" for entry in (ours, theirs)]
        if kinds[0] != kinds[1]:
            changes.append(TensorChange(name=name, what="kind", before=kinds[0], after=kinds[1]))
            continue
        at = _first_difference(before, after, name, ours.length, buffers)
        progress.advance(ours.length)
        if at is None:
            tensors += 1
            tensor_bytes += ours.length
            continue
        values = [str(_byte_at(checkpoint, name, at)) for checkpoint in (before, after)]
        changes.append(
            TensorChange(name=name, what=f"byte {at}", before=values[0], after=values[1])
        )
    return TensorComparison(
        changes=tuple(changes), tensors=tensors, tensor_bytes=tensor_bytes, same_files=same_files
    )


def _byte_at(checkpoint: Checkpoint, name: str, offset: int) -> int:
    one = np.empty(1, np.uint8)
    checkpoint.read_into(name, one, offset=offset)
    return int(one[0])


def _first_difference(
    before: Checkpoint, after: Checkpoint, name: str, length: int, buffers: Sequence[Bytes]
) -> int | None:
    for offset in range(0, length, _PIECE_BYTES):
        ours, theirs = (buffer[: min(_PIECE_BYTES, length - offset)] for buffer in buffers)
        before.read_into(name, ours, offset=offset)
        after.read_into(name, theirs, offset=offset)
        if not np.array_equal(ours, theirs):
            return offset + int(np.argmax(ours != theirs))
    return None
