"""`model.safetensors.index.json`: which file holds which tensor."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import msgspec

from k3quant.errors import StructureError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """The parsed index.

    Attributes:
        weight_map: File of each tensor.
        total_size: Bytes of all tensors as stated, None where it is not stated.
    """

    weight_map: dict[str, str]
    total_size: int | None

    def tensors_by_file(self) -> Counter[str]:
        """Return how many tensors each named file holds."""
        return Counter(self.weight_map.values())


class _Document(msgspec.Struct):
    weight_map: dict[str, str]
    metadata: dict[str, Any] | None = None


_DECODER = msgspec.json.Decoder(_Document)


def parse_index(raw: bytes) -> Index:
    """Parse and check an index.

    Args:
        raw: The file's bytes.

    Raises:
        StructureError: It is no JSON, has a key twice, maps a tensor to no text, or names a file
            outside the folder.
    """
    try:
        document = _DECODER.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StructureError(
            f"{INDEX_FILE}: expected an object with a weight_map of names to files, got "
            f"{str(error)[:200]}"
        ) from error
    _refuse_duplicates(raw, document)
    for file in set(document.weight_map.values()):
        path = PurePosixPath(file)
        if path.is_absolute() or ".." in path.parts or "\\" in file or not file or ":" in file:
            raise StructureError(
                f"{INDEX_FILE}: expected file names inside the folder, got `{file}`",
                hint="an index that leaves its folder is refused; rebuild it with "
                "`k3quant repack --rebuild-index`",
            )
    total = (document.metadata or {}).get("total_size")
    # Some writers store it as a float; a whole one says the same.
    if isinstance(total, float) and total.is_integer():
        total = int(total)
    if total is not None and (type(total) is not int or total < 0):
        raise StructureError(f"{INDEX_FILE}: expected a byte count as total_size, got {total!r}")
    return Index(weight_map=document.weight_map, total_size=total)


def encode_index(weight_map: dict[str, str], total_size: int) -> bytes:
    """Encode an index in the release's form: sorted names, two spaces, total_size alone."""
    document = {
        "metadata": {"total_size": total_size},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return (json.dumps(document, indent=2, ensure_ascii=False)).encode()


def _refuse_duplicates(raw: bytes, document: _Document) -> None:
    # Each pair has one `":`; unless all of them are accounted for, every pair is looked at.
    pairs = len(document.weight_map) + 1
    if document.metadata is not None:
        pairs += len(document.metadata) + 1
    if raw.count(b'":') == pairs:
        return

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            twice = next(key for key, n in Counter(key for key, _ in pairs).items() if n > 1)
            raise StructureError(f"{INDEX_FILE}: expected each name once, got `{twice}` twice")
        return result

    # The fast parser skips fields it does not know without looking at them; this one looks.
    try:
        json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise StructureError(f"{INDEX_FILE}: expected JSON in UTF-8, got {error}") from error
