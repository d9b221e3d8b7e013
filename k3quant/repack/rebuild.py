"""An index made from the headers of the files, after checking that the files are a whole.

The files of a folder are taken only when their own numbering is complete, no tensor lies in two
of them, and, for Kimi-K3, no module of the table is without a tensor.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from k3quant.checkpoint.folder import LocalFolder, Source
from k3quant.checkpoint.header import Header, scan_header
from k3quant.checkpoint.index import INDEX_FILE, encode_index
from k3quant.checkpoint.other_index import OtherIndex
from k3quant.checkpoint.output_file import atomic_write
from k3quant.checkpoint.reader import (
    CONFIG_FILE,
    not_regular,
    raise_first,
    read_json,
    top_level_shards,
)
from k3quant.errors import IncompleteError, StructureError
from k3quant.models.k3_config import looks_like_k3, read_config
from k3quant.models.k3_tensors import num_shards, shard_tensors
from k3quant.report import Report

_NUMBERED = re.compile(r"(.*-)(\d+)-of-(\d+)\.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilt:
    """An index that says what headers say.

    Attributes:
        place: The checkpoint's files with it.
        index: The index, as a file.
        shards: The shards it names.
        num_tensors: Tensors in it.
    """

    place: OtherIndex
    index: bytes
    shards: tuple[str, ...]
    num_tensors: int


def index_from_headers(source: Source) -> Rebuilt:
    """Make an index of all shards of a place from their headers.

    Raises:
        IncompleteError: There are no shards, a number is missing, or a module has no tensor.
        StructureError: A header is malformed, or a tensor lies in two files.
    """
    shards = top_level_shards(source)
    _check_numbers(source, shards)
    headers = {file: _read_header(source, file) for file in shards}
    weight_map = _map_tensors(headers)
    _check_modules(source, weight_map)
    total = sum(e.end - e.begin for h in headers.values() for e in h.tensors.values())
    index = encode_index(weight_map, total)
    return Rebuilt(
        place=OtherIndex(source, index, source.files),
        index=index,
        shards=tuple(shards),
        num_tensors=len(weight_map),
    )


def rebuild_index(folder: Path) -> Report:
    """Write the index of a folder anew from its files' headers, whether it has one or not.

    Args:
        folder: The checkpoint's folder.

    Raises:
        IncompleteError: There are no shards, a number is missing, or a module has no tensor.
        StructureError: A header is malformed, or a tensor lies in two files.
        ResourceError: The index cannot be written.
    """
    rebuilt = index_from_headers(LocalFolder(folder))
    written = atomic_write(folder / INDEX_FILE, rebuilt.index)
    return Report(
        command="repack",
        summary={
            "index": INDEX_FILE,
            "index_sha256": written.sha256,
            "tensors": rebuilt.num_tensors,
            "shards": list(rebuilt.shards),
        },
    )


def _check_numbers(source: Source, shards: list[str]) -> None:
    if not shards:
        raise IncompleteError(
            f"{source.label}: expected shards to index, got none",
            hint="`k3quant download` fetches a checkpoint",
        )
    sets: dict[tuple[str, str], set[int]] = {}
    for file in shards:
        if match := _NUMBERED.fullmatch(file):
            sets.setdefault((match[1], match[3]), set()).add(int(match[2]))
    for (stem, total), numbers in sets.items():
        missing = sorted(set(range(1, int(total) + 1)) - numbers)
        if missing:
            raise IncompleteError(
                f"{source.label}: expected {int(total)} files {stem}*-of-{total}, got "
                f"{len(numbers)}; missing numbers {missing[:8]}",
                hint="an index of the rest would hide the loss; `k3quant download` fetches them",
            )


def _read_header(source: Source, file: str) -> Header:
    info = source.files[file]
    if not info.regular:
        raise_first((not_regular(file),))
    scan = scan_header(
        lambda offset, length: source.read(file, offset, length), file=file, file_bytes=info.size
    )
    raise_first(scan.findings)
    assert scan.header is not None
    return scan.header


def _map_tensors(headers: Mapping[str, Header]) -> dict[str, str]:
    weight_map: dict[str, str] = {}
    for file, header in headers.items():
        for name in header.tensors:
            if name in weight_map:
                raise StructureError(
                    f"{name}: expected it in one file, got it in {weight_map[name]} and {file}",
                    hint="move the file that does not belong to the checkpoint out of the folder",
                )
            weight_map[name] = file
    return weight_map


def _check_modules(source: Source, weight_map: Mapping[str, str]) -> None:
    config = read_json(source, CONFIG_FILE)
    if not looks_like_k3(config):
        return
    k3 = read_config(config)
    held = {name.rpartition(".")[0] for name in weight_map}
    table = {
        spec.module: None
        for shard in range(1, num_shards(k3) + 1)
        for spec in shard_tensors(k3, shard)
    }
    missing = [module for module in table if module not in held]
    if missing:
        raise IncompleteError(
            f"{source.label}: expected tensors for {len(table)} modules of the config, got none "
            f"for {len(missing)}, first {missing[0]}",
            hint="an index of the rest would hide the loss; `k3quant download` fetches it",
        )
