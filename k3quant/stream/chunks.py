"""What is loaded together: a layer's own tensors, or some of its experts, and where each part goes.

A chunk fills an arena, one run of bytes on the device. Experts' parts of one kind lie stacked
there, gate and up projection of an expert behind one another, which is how the kernels take them;
a run of a file that several tensors share is read in one go.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from k3quant.checkpoint.reader import Checkpoint, TensorEntry
from k3quant.models.k3_tensors import TensorSpec

ALIGNMENT = 256
GATE_AND_UP = ("expert.w1", "expert.w3")


class Place(NamedTuple):
    """Where a stored tensor lies in the arena."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    length: int


class Piece(NamedTuple):
    """A run of a file that is read in one go.

    Attributes:
        file: File name.
        offset: First byte in the file.
        length: Bytes.
        parts: Start in the piece, bytes, and start in the arena of each tensor, or of the run of
            it that lies here.
    """

    file: str
    offset: int
    length: int
    parts: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What one arena holds.

    Attributes:
        layer: 0-based layer.
        experts: Experts, ascending; none for the layer's own tensors.
        places: By expert (None for the layer's own), then by role and stored part.
        stacks: By role of the first of a stack and part: `[experts, ...]` shape, start in arena.
        pieces: What is read.
        num_bytes: Bytes of the arena that are used.
    """

    layer: int
    experts: tuple[int, ...]
    places: Mapping[int | None, Mapping[tuple[str, str], Place]]
    stacks: Mapping[tuple[str, str], tuple[tuple[int, ...], int]]
    pieces: tuple[Piece, ...]
    num_bytes: int


def own_chunk(
    checkpoint: Checkpoint, layer: int, specs: Sequence[TensorSpec], *, piece_bytes: int
) -> Chunk:
    """Lay out a layer's own tensors, one behind the other."""
    places: dict[tuple[str, str], Place] = {}
    end = 0
    for spec in specs:
        entry = checkpoint.entry(spec.name)
        places[spec.role, spec.part] = _place(spec.name, entry, end)
        end = _aligned(end + entry.length)
    return Chunk(
        layer=layer,
        experts=(),
        places={None: places},
        stacks={},
        pieces=tuple(_pieces(checkpoint, places.values(), piece_bytes)),
        num_bytes=end,
    )


def expert_chunk(
    checkpoint: Checkpoint,
    layer: int,
    experts: Mapping[int, Sequence[TensorSpec]],
    *,
    piece_bytes: int,
) -> Chunk:
    """Stack the tensors of some experts, which all have the same parts and shapes."""
    first = next(iter(experts.values()))
    groups: dict[tuple[str, str], list[str]] = {}
    for spec in first:
        stack = GATE_AND_UP[0] if spec.role in GATE_AND_UP else spec.role
        groups.setdefault((stack, spec.part), []).append(spec.role)
    lengths = {(s.role, s.part): checkpoint.entry(s.name).length for s in first}
    starts: dict[tuple[str, str], tuple[int, int]] = {}  # start and stride by role and part
    stacks: dict[tuple[str, str], tuple[tuple[int, ...], int]] = {}
    end = 0
    for (stack, part), roles in groups.items():
        stride = sum(lengths[role, part] for role in roles)
        inner = 0
        for role in sorted(roles):
            starts[role, part] = (end + inner, stride)
            inner += lengths[role, part]
        rows, *rest = next(s.shape for s in first if (s.role, s.part) == (stack, part)) or (1,)
        stacks[stack, part] = ((len(experts), len(roles) * rows, *rest), end)
        end = _aligned(end + stride * len(experts))
    places: dict[int | None, dict[tuple[str, str], Place]] = {}
    for at, (expert, specs) in enumerate(experts.items()):
        for spec in specs:
            start, stride = starts[spec.role, spec.part]
            entry = checkpoint.entry(spec.name)
            if entry.length != lengths[spec.role, spec.part]:
                raise ValueError(f"{spec.name}: expected the bytes of the first expert's")
            place = _place(spec.name, entry, start + at * stride)
            places.setdefault(expert, {})[spec.role, spec.part] = place
    everything = [place for own in places.values() for place in own.values()]
    return Chunk(
        layer=layer,
        experts=tuple(experts),
        places=places,
        stacks=stacks,
        pieces=tuple(_pieces(checkpoint, everything, piece_bytes)),
        num_bytes=end,
    )


def _place(name: str, entry: TensorEntry, start: int) -> Place:
    return Place(name, entry.dtype, entry.shape, start, entry.length)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _pieces(checkpoint: Checkpoint, places: Iterable[Place], piece_bytes: int) -> Iterator[Piece]:
    """Yield reads of at most so many bytes; tensors that lie side by side share one."""
    runs = [(checkpoint.entry(p.name).file, checkpoint.entry(p.name).offset, p) for p in places]
    runs.sort(key=lambda run: run[:2])
    for file, together in groupby(runs, key=lambda run: run[0]):
        parts: list[tuple[int, int, int]] = []
        begin = end = 0
        for _, offset, place in together:
            for skip in range(0, place.length, piece_bytes):
                length = min(piece_bytes, place.length - skip)
                at = offset + skip
                if parts and (at != end or at + length - begin > piece_bytes):
                    yield Piece(file, begin, end - begin, tuple(parts))
                    parts = []
                if not parts:
                    begin = at
                parts.append((at - begin, length, place.start + skip))
                end = at + length
        if parts:
            yield Piece(file, begin, end - begin, tuple(parts))
