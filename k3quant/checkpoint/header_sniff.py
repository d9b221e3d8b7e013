"""What a file is whose first eight bytes are no sensible header length."""

import re
import struct

from k3quant.report import FaultClass, Finding

_LFS_MAGIC = b"version https://git-lfs.github.com/spec/"


def explain_foreign_file(sample: bytes, length: int, file: str, file_bytes: int) -> Finding:
    """Say why a header of `length` bytes cannot be in this file.

    Args:
        sample: The first bytes of the file, at most a kilobyte.
        length: What the first eight bytes say as a little-endian number.
        file: Name of the file.
        file_bytes: Its size.

    Returns:
        A finding: LFS pointer, foreign text, byte-swapped length, cut header, or absurd length.
    """
    if sample.startswith(_LFS_MAGIC):
        size = re.search(rb"^size (\d+)", sample, re.MULTILINE)
        real = int(size[1]) if size else None
        return Finding(
            code="lfs-pointer",
            fault=FaultClass.INCOMPLETE,
            subject=file,
            message=f"{file}: expected the shard's bytes, got a Git LFS pointer "
            f"(real size {real if real is not None else 'unknown'}, {file_bytes} bytes here)",
            expected=real,
            got=file_bytes,
            hint="fetch the file itself: `k3quant download`, or `git lfs pull`",
        )
    if sample[:8].isascii() and sample[:8].decode().isprintable():
        start = sample[:15].decode("ascii", "replace")
        return _structure(
            "not-safetensors",
            file,
            f"{file}: not safetensors: expected a header length, got text that starts with "
            f"`{start}`",
            hint="a server's error page was saved under the shard's name; fetch the file again",
        )
    (swapped,) = struct.unpack(">Q", sample[:8])
    if 0 < swapped <= file_bytes - 8 and sample[8:9] == b"{":
        return _structure(
            "byte-swapped-length",
            file,
            f"{file}: expected a little-endian header length of at most {file_bytes - 8}, "
            f"got {length}",
            hint=f"byte-swapped length: read as big-endian it is {swapped}",
            got=str(length),
        )
    if sample[8:9] == b"{" and length < 1 << 40:
        missing = length + 8 - file_bytes
        return Finding(
            code="short-header",
            fault=FaultClass.INCOMPLETE,
            subject=file,
            message=f"{file}: header incomplete: expected {length} bytes of header, "
            f"got {file_bytes - 8} (short by {missing})",
            expected=length,
            got=file_bytes - 8,
            hint="the file was cut; fetch it again",
        )
    return _structure(
        "bad-header-length",
        file,
        f"{file}: expected a header length of at most {max(file_bytes - 8, 0)}, got {length}",
        got=str(length),
    )


def _structure(
    code: str, file: str, message: str, *, hint: str = "", got: str | None = None
) -> Finding:
    return Finding(
        code=code, fault=FaultClass.STRUCTURE, subject=file, message=message, hint=hint, got=got
    )
