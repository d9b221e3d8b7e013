"""Safetensors headers: read, check every rule of the format, write.

A file is eight bytes of little-endian length, that many bytes of JSON (space-padded), then the
tensors' bytes without gaps. Nothing here reads tensor data or allocates by a length it has not
checked.

Source: huggingface/safetensors, README `Format` and `safetensors/src/tensor.rs`.
"""

import json
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from k3quant.checkpoint.header_layout import check_layout
from k3quant.checkpoint.header_sniff import explain_foreign_file
from k3quant.formats.dtypes import DTYPES
from k3quant.report import FaultClass, Finding

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the format's own limit

Fetch = Callable[[int, int], bytes]
"""Reads `length` bytes at `offset`, fewer only where the file ends."""


class HeaderEntry(NamedTuple):
    """One tensor as its header states it; `begin` and `end` count from the data section."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The header of one file.

    Attributes:
        file: Name of the file, for messages.
        file_bytes: Size of the whole file.
        json_bytes: Length of the JSON with its padding.
        metadata: `__metadata__`, empty where there is none.
        tensors: Entries by name, in the order of the JSON.
    """

    file: str
    file_bytes: int
    json_bytes: int
    metadata: dict[str, str]
    tensors: dict[str, HeaderEntry]

    @property
    def data_start(self) -> int:
        """Offset of the data section in the file."""
        return LENGTH_BYTES + self.json_bytes


@dataclass(frozen=True, slots=True)
class HeaderScan:
    """What a scan of one file found; `header` is None where nothing could be parsed."""

    header: Header | None
    findings: tuple[Finding, ...]
    raw: bytes = b""


def scan_header(fetch: Fetch, *, file: str, file_bytes: int) -> HeaderScan:
    """Read and check the header of a file.

    Args:
        fetch: Reads ranges of the file.
        file: Its name, for messages.
        file_bytes: Its size in bytes.

    Returns:
        The header and its JSON bytes where they could be read, and every fault found.
    """
    prefix = fetch(0, LENGTH_BYTES)
    if len(prefix) < LENGTH_BYTES:
        what = "an empty file" if not prefix else f"{len(prefix)} bytes"
        message = f"{file}: expected at least 8 bytes for the header's length, got {what}"
        return _failed(FaultClass.INCOMPLETE, "too-small", file, message)
    (length,) = struct.unpack("<Q", prefix)
    if length > min(MAX_HEADER_BYTES, max(file_bytes - LENGTH_BYTES, 0)):
        sample = fetch(0, 1024)
        return HeaderScan(None, (explain_foreign_file(sample, length, file, file_bytes),))
    raw = fetch(LENGTH_BYTES, length)
    if len(raw) < length:
        message = f"{file}: expected {length} bytes of header, got {len(raw)} (file shrank)"
        return _failed(FaultClass.INCOMPLETE, "short-read", file, message)
    try:
        tensors, metadata = parse_json(raw)
    except HeaderError as fault:
        message = f"{file}: {fault}"
        return HeaderScan(None, (_structure(fault.code, file, message),), raw)
    header = Header(
        file=file, file_bytes=file_bytes, json_bytes=length, metadata=metadata, tensors=tensors
    )
    return HeaderScan(header, tuple(check_layout(header)), raw)


class HeaderError(Exception):
    """The JSON of a header breaks the format; the message lacks the file's name."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class _Entry(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_FAST = msgspec.json.Decoder(dict[str, _Entry])


def parse_json(raw: bytes) -> tuple[dict[str, HeaderEntry], dict[str, str]]:
    """Parse a header's JSON into entries and metadata.

    The fast decoder keeps the last of two equal keys, so its result counts only when every field
    name occurs once a tensor; anything unusual is parsed again with each pair in view.

    Raises:
        HeaderError: The JSON breaks the format.
    """
    if not raw.startswith(b"{"):
        raise HeaderError("bad-json", f"expected a header that starts with `{{`, got {raw[:1]!r}")
    if b"__metadata__" not in raw:
        try:
            fast = _FAST.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass
        else:
            once = all(
                raw.count(b'"%s"' % field) == len(fast)
                for field in (b"dtype", b"shape", b"data_offsets")
            )
            if once:
                return {
                    name: HeaderEntry(e.dtype, e.shape, *e.data_offsets) for name, e in fast.items()
                }, {}
    return _parse_carefully(raw)


def encode_header(
    entries: Iterable[tuple[str, str, tuple[int, ...]]],
    *,
    metadata: dict[str, str] | None = None,
    align: int = 8,
    keep_order: bool = False,
) -> tuple[bytes, dict[str, HeaderEntry]]:
    """Lay tensors out as the format's own writer does and encode their header.

    Wide dtypes first, then names in byte order, without gaps; this is the release's order.

    Args:
        entries: Name, dtype and shape of each tensor.
        metadata: `__metadata__`; None writes no such key, as in the release.
        align: The data section starts at a multiple of this many bytes of the file.
        keep_order: Lay tensors out in the given order instead.

    Returns:
        The eight length bytes with the padded JSON, and each tensor's place.

    Raises:
        ValueError: Two tensors have one name.
    """
    ordered = list(entries)
    if not keep_order:
        ordered.sort(key=lambda e: (-DTYPES[e[1]].rank, e[0].encode()))
    placed: dict[str, HeaderEntry] = {}
    document: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    offset = 0
    for name, dtype, shape in ordered:
        if name in placed:
            raise ValueError(f"tensor {name}: expected one of that name, got two")
        count = 1
        for size in shape:
            count *= size
        end = offset + DTYPES[dtype].byte_count(count)
        placed[name] = HeaderEntry(dtype, shape, offset, end)
        document[name] = {"dtype": dtype, "shape": shape, "data_offsets": (offset, end)}
        offset = end
    text = msgspec.json.encode(document)
    text += b" " * (-(LENGTH_BYTES + len(text)) % align)
    return struct.pack("<Q", len(text)) + text, placed


def _parse_carefully(raw: bytes) -> tuple[dict[str, HeaderEntry], dict[str, str]]:
    try:
        document = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        message = f"expected UTF-8, got byte 0x{raw[error.start]:02x} at header byte {error.start}"
        raise HeaderError("bad-utf8", message) from error
    except json.JSONDecodeError as error:
        message = f"expected JSON, got {error.msg.lower()} at header byte {error.pos}"
        raise HeaderError("bad-json", message) from error
    except RecursionError as error:
        raise HeaderError("bad-json", "expected a flat object, got deep nesting") from error
    except ValueError as error:  # an integer of more digits than Python converts
        raise HeaderError("bad-json", "expected 64-bit integers, got a longer one") from error
    metadata = _check_metadata(document.pop("__metadata__", {}))
    return {name: _check_entry(name, fields) for name, fields in document.items()}, metadata


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise HeaderError("duplicate-key", f"expected each key once, got `{key}` twice")
            seen.add(key)
    return result


def _check_metadata(metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict):
        raise HeaderError(
            "bad-metadata", f"expected `__metadata__` to be an object, got {metadata!r}"
        )
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise HeaderError(
                "bad-metadata",
                f"metadata value of `{key}` must be a string: expected text, got {value!r}",
            )
    return metadata


def _check_entry(name: str, fields: Any) -> HeaderEntry:
    where = f"tensor {name}"
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise HeaderError("bad-utf8", f"expected names in Unicode, got {name!r}") from error
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        got = sorted(fields) if isinstance(fields, dict) else repr(fields)[:80]
        raise HeaderError(
            "bad-entry", f"{where}: expected the fields dtype, shape and data_offsets, got {got}"
        )
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str):
        raise HeaderError("bad-entry", f"{where}: expected a dtype in text, got {dtype!r}")
    if not _are_ints(shape):
        raise HeaderError("bad-shape", f"{where}: expected a list of sizes, got {shape!r}")
    if not _are_ints(offsets) or len(offsets) != 2:
        raise HeaderError("bad-offsets", f"{where}: expected two offsets, got {offsets!r}")
    return HeaderEntry(dtype, tuple(shape), offsets[0], offsets[1])


def _are_ints(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _structure(code: str, file: str, message: str) -> Finding:
    return Finding(code=code, fault=FaultClass.STRUCTURE, subject=file, message=message)


def _failed(fault: FaultClass, code: str, file: str, message: str) -> HeaderScan:
    return HeaderScan(None, (Finding(code=code, fault=fault, subject=file, message=message),))
