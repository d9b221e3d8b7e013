"""From an output file to the ranges of the source that make it."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from k3quant.checkpoint.header import HeaderEntry, encode_header
from k3quant.checkpoint.reader import Checkpoint, TensorEntry
from k3quant.checkpoint.shards import ShardFile


class CopyRange(NamedTuple):
    """Bytes of a source file and where they go in an output."""

    file: str
    offset: int
    target: int
    length: int


class PlannedHeader(NamedTuple):
    """An output's header, and what makes the rest of it."""

    header: bytes
    places: dict[str, HeaderEntry]
    ranges: list[CopyRange]


def lay_out(
    shard: ShardFile, entries: Mapping[str, TensorEntry], checkpoint: Checkpoint, align: int
) -> PlannedHeader:
    """Lay out an output file and find the ranges of the source that make it.

    Its `__metadata__` is what the source files that feed it say; a key on which they differ is
    left out.

    Args:
        shard: The file and its tensors.
        entries: Range of each tensor in the source.
        checkpoint: The source.
        align: Alignment of the data section.
    """
    feeding = dict.fromkeys(entries[item.name].file for item in shard.items)
    metadata, _ = merge_metadata([checkpoint.headers[file].metadata for file in feeding])
    header, places = encode_header(
        ((item.name, item.dtype, item.shape) for item in shard.items),
        metadata=metadata or None,
        align=align,
    )
    ranges: list[CopyRange] = []
    for name, place in places.items():
        _, _, file, offset, length = entries[name]
        target = len(header) + place.begin
        if ranges:
            last = ranges[-1]
            if last.file == file and last.offset + last.length == offset:
                ranges[-1] = last._replace(length=last.length + length)
                continue
        if length:
            ranges.append(CopyRange(file, offset, target, length))
    return PlannedHeader(header, places, ranges)


def find_links(
    shards: Iterable[ShardFile],
    entries: Mapping[str, TensorEntry],
    checkpoint: Checkpoint,
    align: int,
) -> dict[str, str]:
    """Return the source file of each output that would equal it byte for byte.

    Args:
        shards: The outputs.
        entries: Range of each tensor in the source.
        checkpoint: The source.
        align: Alignment of the data section.
    """
    linked: dict[str, str] = {}
    for shard in shards:
        files = {entries[item.name].file for item in shard.items}
        source = min(files, default="")
        if len(files) != 1 or len(shard.items) != len(checkpoint.headers[source].tensors):
            continue
        header, places, _ = lay_out(shard, entries, checkpoint, align)
        at_home = all(
            entries[name].offset == len(header) + place.begin for name, place in places.items()
        )
        if at_home and checkpoint.source.read(source, 0, len(header)) == header:
            linked[shard.file] = source
    return linked


def merge_metadata(parts: Iterable[Mapping[str, str]]) -> tuple[dict[str, str], set[str]]:
    """Return the keys on which all that state them agree, and the keys on which they differ."""
    merged: dict[str, str] = {}
    differing: set[str] = set()
    for part in parts:
        for key, value in part.items():
            if merged.setdefault(key, value) != value:
                differing.add(key)
    return {key: value for key, value in merged.items() if key not in differing}, differing
