"""The GGUF container: typed metadata, tensor infos, then data, all little-endian.

A file is `GGUF`, u32 version, u64 tensor count, u64 field count, the fields, the tensor infos,
zeros up to a multiple of 32, and the tensors, each padded to 32. Example: a field `a` of u32 7 is
`01 00 00 00 00 00 00 00 61 04 00 00 00 07 00 00 00` (length, key, type, value). Torch-free.

Source: ggml-org/ggml, `docs/gguf.md`, and ggml-org/llama.cpp, `ggml/include/ggml.h`.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from types import MappingProxyType

from k3quant.errors import SchemaError

MAGIC = b"GGUF"
VERSION = 3
ALIGNMENT = 32
MAX_DIMENSIONS = 4


class ValueType(IntEnum):
    """Types of metadata values, by their number in the file."""

    U16 = 2
    I16 = 3
    U32 = 4
    I32 = 5
    F32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9


_FORMATS = {
    ValueType.U16: "<H", ValueType.I16: "<h", ValueType.U32: "<I", ValueType.I32: "<i",
    ValueType.F32: "<f", ValueType.BOOL: "<?",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgmlType:
    """One element type: its number in the file, elements a block and bytes a block."""

    number: int
    block: int
    block_bytes: int

    def row_bytes(self, cols: int) -> int:
        """Return the bytes of a row.

        Raises:
            SchemaError: The columns are no whole blocks.
        """
        blocks, rest = divmod(cols, self.block)
        if rest:
            raise SchemaError(f"columns: expected whole blocks of {self.block}, got {cols}")
        return blocks * self.block_bytes


GGML_TYPES: Mapping[str, GgmlType] = MappingProxyType(
    {
        "F32": GgmlType(0, 1, 4),
        "F16": GgmlType(1, 1, 2),
        "Q8_0": GgmlType(8, 32, 34),
        "BF16": GgmlType(30, 1, 2),
        "MXFP4": GgmlType(39, 32, 17),
    }
)
"""Element types that an export writes, by ggml's names."""

Scalar = bool | int | float | str


@dataclass(frozen=True, slots=True)
class MetaField:
    """One metadata field.

    Attributes:
        key: Its key.
        type: Type of the value, or of each element of an array.
        value: A scalar, or a list or tuple for an array.
    """

    key: str
    type: ValueType
    value: Scalar | Sequence[Scalar]

    def encode(self) -> bytes:
        """Return the field's bytes.

        Raises:
            ValueError: A value does not fit its type.
        """
        head = _string(self.key)
        try:
            if isinstance(self.value, str) or not isinstance(self.value, Sequence):
                return head + struct.pack("<I", self.type) + _encode(self.type, (self.value,))
            body = _encode(self.type, self.value)
        except struct.error as error:
            raise ValueError(
                f"{self.key}: expected {self.type.name} values, got {error}"
            ) from error
        return head + struct.pack("<IIQ", ValueType.ARRAY, self.type, len(self.value)) + body


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file: name, ggml type by name, shape with the last dimension contiguous."""

    name: str
    type: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its data, without padding.

        Raises:
            SchemaError: Its rows are no whole blocks.
        """
        try:
            row_bytes = GGML_TYPES[self.type].row_bytes(self.shape[-1])
        except SchemaError as error:
            raise SchemaError(
                f"tensor {self.name} as {self.type}: {error.message}",
                hint="choose another float type",
            ) from error
        return prod(self.shape[:-1]) * row_bytes

    def encode(self, offset: int) -> bytes:
        """Return its info; `offset` counts from the data section's start."""
        if not 0 < len(self.shape) <= MAX_DIMENSIONS:
            raise ValueError(f"tensor {self.name}: expected 1 to 4 dimensions, got {self.shape}")
        dimensions = struct.pack(f"<I{len(self.shape)}Q", len(self.shape), *reversed(self.shape))
        number = GGML_TYPES[self.type].number
        return _string(self.name) + dimensions + struct.pack("<IQ", number, offset)


def padded(size: int) -> int:
    """Return a size rounded up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def header_bytes(fields: Iterable[MetaField], tensors: Iterable[TensorInfo]) -> int:
    """Return the bytes before the data section."""
    size = len(MAGIC) + struct.calcsize("<IQQ")
    size += sum(len(field.encode()) for field in fields)
    return padded(size + sum(len(tensor.encode(0)) for tensor in tensors))


def encode_file(
    fields: Sequence[MetaField], tensors: Sequence[TensorInfo]
) -> tuple[bytes, dict[str, tuple[int, int]], int]:
    """Lay tensors out in the given order.

    Args:
        fields: The metadata.
        tensors: The tensors.

    Returns:
        Everything before the data section; first and last-plus-one byte of each tensor in the
        file; the size of the file.

    Raises:
        ValueError: A key or a tensor stands twice.
        SchemaError: A tensor's rows are no whole blocks.
    """
    _refuse_twice("key", [field.key for field in fields])
    _refuse_twice("tensor", [tensor.name for tensor in tensors])
    header = bytearray(MAGIC + struct.pack("<IQQ", VERSION, len(tensors), len(fields)))
    for field in fields:
        header += field.encode()
    offset = 0
    begins = []
    for tensor in tensors:
        header += tensor.encode(offset)
        begins.append(offset)
        offset += padded(tensor.num_bytes)
    header += bytes(padded(len(header)) - len(header))
    start = len(header)
    places = {
        tensor.name: (start + begin, start + begin + tensor.num_bytes)
        for tensor, begin in zip(tensors, begins, strict=True)
    }
    return bytes(header), places, start + offset


def _refuse_twice(what: str, words: list[str]) -> None:
    seen: set[str] = set()
    for word in words:
        if word in seen:
            raise ValueError(f"{what} {word}: expected it once, got it twice")
        seen.add(word)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _encode(kind: ValueType, values: Sequence[Scalar]) -> bytes:
    if kind is ValueType.STRING:
        return b"".join(_string(str(value)) for value in values)
    return b"".join(struct.pack(_FORMATS[kind], value) for value in values)
