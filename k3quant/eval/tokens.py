"""Token ids to score: from a text through the tokenizer, or from a file of ids."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from k3quant.checkpoint.folder import LocalFolder
from k3quant.checkpoint.header import scan_header
from k3quant.checkpoint.reader import raise_first
from k3quant.errors import IncompleteError, SchemaError, StructureError, UsageError
from k3quant.eval.windows import Ids
from k3quant.formats.dtypes import DTYPES
from k3quant.models.tokenizer import Tokenizer, read_text

IDS_NAME = "input_ids"


def read_documents(path: Path) -> tuple[Ids, ...]:
    """Read a file of token ids.

    Args:
        path: `.safetensors` with `input_ids`, `[N]` or `[B, N]` integers; `.npy` of the same
            shapes; or `.jsonl` with a list of ids on each line.

    Returns:
        One `[n]` int64 a document. Every row of `[B, N]` and every line is its own document.

    Raises:
        UsageError: The name ends in none of these.
        IncompleteError: The file is missing or short.
        StructureError: It is malformed.
        SchemaError: The ids are no integers, or of another shape.
    """
    readers = {".safetensors": _read_safetensors, ".npy": _read_npy, ".jsonl": _read_lines}
    reader = readers.get(path.suffix)
    if reader is None:
        raise UsageError(
            f"{path.name}: expected a file of ids named *.safetensors, *.npy or *.jsonl",
            hint="`--text` takes a text",
        )
    if not path.is_file():
        raise IncompleteError(f"{path}: expected a file of ids, got none")
    return tuple(reader(path))


def encode_text(path: Path, tokenizer: Tokenizer) -> tuple[Ids, ...]:
    """Encode a text as one document; control tokens in it are text like any other.

    Raises:
        IncompleteError: The file is missing.
        StructureError: It is not UTF-8.
    """
    return (np.array(tokenizer.encode(read_text(path)), dtype=np.int64),)


def check_ids(documents: Sequence[Ids], *, vocab_size: int, label: str) -> None:
    """Refuse ids outside the vocabulary.

    Raises:
        SchemaError: Names the document, the position, the id and the vocabulary's size.
    """
    for number, ids in enumerate(documents):
        bad = np.flatnonzero((ids < 0) | (ids >= vocab_size))
        if len(bad):
            raise SchemaError(
                f"{label}: document {number}, position {bad[0]}: expected an id from 0 to "
                f"{vocab_size - 1}, got {ids[bad[0]]}",
                hint="the ids come from another tokenizer",
            )


def digest_ids(documents: Sequence[Ids]) -> str:
    """Return the SHA-256 of ids and document lengths, in hex.

    Each document counts as its length and its ids, all as 8 little-endian bytes.
    """
    digest = hashlib.sha256()
    for ids in documents:
        digest.update(len(ids).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(ids, dtype="<i8").tobytes())
    return digest.hexdigest()


def _read_safetensors(path: Path) -> Iterator[Ids]:
    source = LocalFolder(path.parent)

    def fetch(offset: int, length: int) -> bytes:
        return source.read(path.name, offset, length)

    scan = scan_header(fetch, file=path.name, file_bytes=path.stat().st_size)
    raise_first(scan.findings)
    assert scan.header is not None
    entry = scan.header.tensors.get(IDS_NAME)
    if entry is None:
        raise SchemaError(f"{path.name}: expected a tensor {IDS_NAME}, got none of that name")
    numpy_name = DTYPES[entry.dtype].numpy_name
    if numpy_name is None or np.dtype(numpy_name).kind not in "iu":
        raise SchemaError(f"{path.name}: expected {IDS_NAME} of integers, got {entry.dtype}")
    data = fetch(scan.header.data_start + entry.begin, entry.end - entry.begin)
    ids = np.frombuffer(data, dtype=np.dtype(numpy_name).newbyteorder("<"))
    yield from _rows(ids.reshape(entry.shape), path)


def _read_npy(path: Path) -> Iterator[Ids]:
    try:
        ids = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise StructureError(f"{path.name}: expected an array of numpy, got {error}") from error
    if not isinstance(ids, np.ndarray) or ids.dtype.kind not in "iu":
        raise SchemaError(f"{path.name}: expected an array of integers, got {ids.dtype}")
    yield from _rows(ids, path)


def _rows(ids: npt.NDArray[Any], path: Path) -> Iterator[Ids]:
    if ids.ndim not in (1, 2):
        raise SchemaError(
            f"{path.name}: expected ids of shape [N] or [B, N], got {list(ids.shape)}"
        )
    yield from np.atleast_2d(ids).astype(np.int64)


def _read_lines(path: Path) -> Iterator[Ids]:
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path.name}, line {number}"
        try:
            ids = json.loads(line)
        except ValueError as error:
            raise StructureError(f"{where}: expected a list of ids, got {error}") from error
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise SchemaError(f"{where}: expected a list of integers")
        try:
            yield np.array(ids, dtype=np.int64)
        except OverflowError as error:
            raise SchemaError(f"{where}: expected ids below 2^63") from error
