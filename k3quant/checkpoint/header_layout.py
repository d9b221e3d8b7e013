"""Where a header puts its tensors: inside the file, without gap, overlap or surplus."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from k3quant.formats.dtypes import DTYPES
from k3quant.report import FaultClass, Finding, fault

if TYPE_CHECKING:
    from k3quant.checkpoint.header import Header

_MAX_BYTES = (1 << 63) - 1
_fault = partial(fault, FaultClass.STRUCTURE)


def check_layout(header: "Header") -> Iterator[Finding]:
    """Yield every fault of shapes, ranges and file size in a parsed header.

    Ranges are checked for tensors of unknown dtype too.
    """
    file = header.file
    for name, (dtype, shape, begin, end) in header.tensors.items():
        subject = f"{file}: tensor {name}"
        if begin < 0 or end < begin:
            message = f"{subject}: expected offsets in order, got [{begin}, {end}]"
            yield _fault("bad-offsets", file, message)
        known = DTYPES.get(dtype)
        if known is None:
            message = f"{subject}: expected a dtype of the format, got unknown dtype `{dtype}`"
            yield _fault("unknown-dtype", file, message, got=dtype)
        count = 1
        for size in shape:
            count *= size
        if shape and min(shape) < 0:
            message = f"{subject}: bad shape: expected sizes of at least 0, got {list(shape)}"
            yield _fault("bad-shape", file, message, got=str(list(shape)))
        elif known is not None and (count * known.bits) % 8:
            message = f"{subject}: expected whole bytes, got {count} elements of {known.bits} bits"
            yield _fault("shape-bytes", file, message)
        elif known is not None and count * known.bits // 8 != end - begin:
            yield _wrong_bytes(file, subject, dtype, shape, count * known.bits // 8, end - begin)
    yield from _check_ranges(header)


def _wrong_bytes(
    file: str, subject: str, dtype: str, shape: tuple[int, ...], declared: int, stored: int
) -> Finding:
    overflow = " (overflows 64 bits)" if declared > _MAX_BYTES else ""
    message = (
        f"{subject}: expected {declared} bytes{overflow} for {dtype} {list(shape)}, "
        f"got a range of {stored}"
    )
    return _fault("shape-bytes", file, message, expected=str(declared), got=str(stored))


def _check_ranges(header: "Header") -> Iterator[Finding]:
    file, file_bytes = header.file, header.file_bytes
    payload = file_bytes - header.data_start
    last, last_end = "", 0
    first_lost: str | None = None
    for name, entry in sorted(header.tensors.items(), key=lambda item: item[1][2:]):
        begin, end = entry.begin, entry.end
        if begin < last_end and begin != end:
            message = (
                f"{file}: tensors {last} and {name} overlap: expected {name} to begin at "
                f"{last_end}, got {begin}"
            )
            yield _fault("overlap", file, message, expected=last_end, got=begin)
        elif begin > last_end:
            hole = begin - last_end
            message = (
                f"{file}: hole of {hole} bytes before tensor {name}: expected it to begin at "
                f"{last_end}, got {begin}"
            )
            yield _fault("hole", file, message, expected=last_end, got=begin)
        if end > payload and first_lost is None:
            first_lost = name
        if end >= last_end:
            last, last_end = name, end
    expected = header.data_start + last_end
    if first_lost is not None:
        yield Finding(
            code="short-file",
            fault=FaultClass.INCOMPLETE,
            subject=file,
            message=f"{file}: short by {expected - file_bytes} bytes: expected {expected}, got "
            f"{file_bytes}; first tensor past the end is {first_lost}",
            expected=expected,
            got=file_bytes,
            hint="the file was cut; fetch it again",
        )
    elif expected < file_bytes:
        message = (
            f"{file}: {file_bytes - expected} bytes after the last tensor: expected {expected}, "
            f"got {file_bytes}"
        )
        yield _fault("trailing-bytes", file, message, expected=expected, got=file_bytes)
