"""An opened checkpoint: every tensor by name, read by ranges, nothing held.

Opening is strict: the first fault in a header or in the index is raised. `verify` reports them all.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from k3quant.checkpoint.folder import LocalFolder, Source, prefetch_headers
from k3quant.checkpoint.header import Header, scan_header
from k3quant.checkpoint.index import INDEX_FILE, Index, parse_index
from k3quant.checkpoint.join import SHARD_SUFFIX, join_index
from k3quant.errors import (
    IncompleteError,
    K3QuantError,
    ResourceError,
    SchemaError,
    StructureError,
)
from k3quant.report import FaultClass, Finding, Severity

CONFIG_FILE = "config.json"


class TensorEntry(NamedTuple):
    """Where a tensor's bytes lie.

    Attributes:
        dtype: Safetensors dtype.
        shape: Stored shape.
        file: File below the checkpoint's root.
        offset: First byte in the file.
        length: Bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose structure was checked when it was opened.

    Attributes:
        source: Where its files lie.
        config: The parsed config.json.
        index: The index, None for a single file.
        headers: Header of each shard, by file.
        entries: Place of each tensor, by name.
    """

    source: Source
    config: dict[str, Any]
    index: Index | None
    headers: Mapping[str, Header]
    entries: Mapping[str, TensorEntry]

    def entry(self, name: str) -> TensorEntry:
        """Return a tensor's place.

        Raises:
            SchemaError: The checkpoint has no such tensor.
        """
        found = self.entries.get(name)
        if found is None:
            raise SchemaError(f"{self.source.label}: expected tensor {name}, got none of that name")
        return found

    def read(self, name: str) -> npt.NDArray[np.uint8]:
        """Read a tensor's bytes.

        Raises:
            SchemaError: The checkpoint has no such tensor.
            IncompleteError: Its file ends too early.
            ResourceError: The system refused the read.
        """
        buffer = np.empty(self.entry(name).length, dtype=np.uint8)
        self.read_into(name, buffer)
        return buffer

    def read_into(self, name: str, buffer: npt.NDArray[np.uint8], *, offset: int = 0) -> None:
        """Fill a buffer with a tensor's bytes, from `offset` within the tensor on.

        Raises:
            SchemaError: The checkpoint has no such tensor.
            ValueError: The buffer reaches beyond the tensor.
            IncompleteError: Its file ends too early.
            ResourceError: The system refused the read.
        """
        entry = self.entry(name)
        if offset < 0 or offset + buffer.nbytes > entry.length:
            raise ValueError(f"{name}: expected a range within {entry.length} bytes")
        try:
            view = memoryview(buffer.data).cast("B")
            self.source.read_into(entry.file, entry.offset + offset, view)
        except K3QuantError as error:
            raise type(error)(f"{error.message}, reading tensor {name}", hint=error.hint) from error


def open_checkpoint(place: Path | Source) -> Checkpoint:
    """Open a checkpoint: its config, index and every header, checked against each other.

    Args:
        place: A local folder, or any source of files.

    Raises:
        IncompleteError: The folder, config, index or a shard is missing or short.
        StructureError: A header or the index is malformed, or they disagree.
        SchemaError: config.json holds no object.
        ResourceError: A shard is no regular file, or the system refused a read.
    """
    source = LocalFolder(place) if isinstance(place, Path) else place
    config = read_json(source, CONFIG_FILE)
    index = read_index(source)
    names = sorted(set(index.weight_map.values())) if index else [single_shard(source)]
    prefetch_headers(source, names)
    headers: dict[str, Header] = {}
    for file in names:
        if file in source.files:
            headers[file] = _read_header(source, file)
    if index is not None:
        if not headers:  # a stale index: say which files are there instead
            headers = {file: _read_header(source, file) for file in top_level_shards(source)}
        raise_first(tuple(join_index(index, source.files, headers)))
    entries = {
        name: TensorEntry(e.dtype, e.shape, file, header.data_start + e.begin, e.end - e.begin)
        for file, header in headers.items()
        for name, e in header.tensors.items()
    }
    return Checkpoint(source=source, config=config, index=index, headers=headers, entries=entries)


def read_index(source: Source) -> Index | None:
    """Read a checkpoint's index, None where a single shard needs none.

    Raises:
        IncompleteError: There are no shards, or several without an index.
        StructureError: The index is malformed.
    """
    if INDEX_FILE in source.files:
        return parse_index(source.read(INDEX_FILE, 0, source.files[INDEX_FILE].size))
    shards = top_level_shards(source)
    if len(shards) == 1:
        return None
    if not shards:
        raise IncompleteError(
            f"{source.label}: expected {INDEX_FILE} and its shards, got no shards",
            hint="`k3quant download` fetches a checkpoint",
        )
    raise IncompleteError(
        f"{source.label}: index missing: expected {INDEX_FILE} beside {len(shards)} shards",
        hint="`k3quant repack --rebuild-index` writes one from the shards' headers",
    )


def top_level_shards(source: Source) -> list[str]:
    """Return the safetensors files directly in the checkpoint's folder."""
    return sorted(f for f in source.files if f.endswith(SHARD_SUFFIX) and "/" not in f)


def single_shard(source: Source) -> str:
    """Return the only shard of a checkpoint without an index."""
    return top_level_shards(source)[0]


def read_json(source: Source, file: str) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        IncompleteError: The file is missing.
        SchemaError: It holds no JSON object.
    """
    info = source.files.get(file)
    if info is None or not info.regular:
        raise IncompleteError(
            f"{source.label}: expected {file}, got none",
            hint="a checkpoint needs its config.json; `k3quant download` fetches it",
        )
    try:
        document = json.loads(source.read(file, 0, info.size))
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"{file}: expected JSON, got {error}") from error
    if not isinstance(document, dict):
        raise SchemaError(f"{file}: expected an object, got {type(document).__name__}")
    return document


def not_regular(file: str) -> Finding:
    """Return the finding about a folder or device that is named like a shard."""
    return Finding(
        code="not-regular",
        fault=FaultClass.IO,
        subject=file,
        message=f"{file}: not a regular file: expected a shard, got a directory or device",
    )


def _read_header(source: Source, file: str) -> Header:
    info = source.files[file]
    if not info.regular:
        raise_first((not_regular(file),))

    def fetch(offset: int, length: int) -> bytes:
        return source.read(file, offset, length)

    scan = scan_header(fetch, file=file, file_bytes=info.size)
    raise_first(scan.findings)
    assert scan.header is not None
    return scan.header


_ERROR_OF: Mapping[FaultClass, type[K3QuantError]] = {
    FaultClass.INCOMPLETE: IncompleteError,
    FaultClass.STRUCTURE: StructureError,
    FaultClass.SCHEMA: SchemaError,
    FaultClass.IO: ResourceError,
}


def raise_first(findings: tuple[Finding, ...]) -> None:
    """Raise the first finding that is an error, in the class of its fault."""
    for finding in findings:
        if finding.severity is Severity.ERROR:
            raise _ERROR_OF[finding.fault](finding.message, hint=finding.hint)
