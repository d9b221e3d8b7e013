import struct

import pytest

from k3quant.errors import SchemaError
from k3quant.schemes.gguf_file import (
    GGML_TYPES,
    MetaField,
    TensorInfo,
    ValueType,
    encode_file,
    header_bytes,
    padded,
)


def _key(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


@pytest.mark.parametrize(
    ("kind", "value", "number", "body"),
    [
        (ValueType.U16, 513, 2, "0102"),
        (ValueType.I16, -2, 3, "feff"),
        (ValueType.U32, 7, 4, "07000000"),
        (ValueType.I32, -1, 5, "ffffffff"),
        (ValueType.F32, -5.0, 6, "0000a0c0"),
        (ValueType.BOOL, True, 7, "01"),
        (ValueType.STRING, "é", 8, "0200000000000000c3a9"),
    ],
    ids="u16 i16 u32 i32 f32 bool string".split(),
)
def test_scalar_field_bytes(kind, value, number, body):
    expected = _key("a") + struct.pack("<I", number) + bytes.fromhex(body)
    assert MetaField("a", kind, value).encode() == expected


@pytest.mark.parametrize(
    ("kind", "values", "number", "body"),
    [
        (ValueType.I32, [1, 0], 5, "0100000000000000"),
        (ValueType.STRING, ["x", ""], 8, "0100000000000000780000000000000000"),
        (ValueType.I32, [], 5, ""),
    ],
    ids="integers strings empty".split(),
)
def test_array_field_bytes(kind, values, number, body):
    head = struct.pack("<IIQ", 9, number, len(values))
    assert MetaField("a", kind, values).encode() == _key("a") + head + bytes.fromhex(body)


def test_value_beyond_its_type_is_a_programming_error():
    with pytest.raises(ValueError, match=r"split\.no: expected U16 values"):
        MetaField("split.no", ValueType.U16, 70_000).encode()


def test_tensor_info_stores_the_contiguous_dimension_first():
    info = TensorInfo("t", "BF16", (2, 3, 5)).encode(64)
    assert info == _key("t") + struct.pack("<I3QIQ", 3, 5, 3, 2, 30, 64)


@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [
        ("F32", (3,), 12),
        ("F16", (2, 3), 12),
        ("BF16", (2, 3), 12),
        ("Q8_0", (2, 64), 136),
        ("MXFP4", (4, 2, 32), 136),
    ],
    ids=lambda value: str(value),
)
def test_tensor_bytes(dtype, shape, size):
    assert TensorInfo("t", dtype, shape).num_bytes == size


def test_type_numbers_are_ggmls():
    numbers = {name: kind.number for name, kind in GGML_TYPES.items()}
    assert numbers == {"F32": 0, "F16": 1, "Q8_0": 8, "BF16": 30, "MXFP4": 39}


def test_partial_block_is_refused_by_name():
    with pytest.raises(SchemaError, match=r"tensor t as MXFP4: columns: .*32, got 48"):
        _ = TensorInfo("t", "MXFP4", (2, 48)).num_bytes


@pytest.mark.parametrize("shape", [(), (1, 1, 1, 1, 1)], ids="none five".split())
def test_dimensions_beyond_the_format_are_a_programming_error(shape):
    with pytest.raises(ValueError, match="expected 1 to 4 dimensions"):
        TensorInfo("t", "F32", shape).encode(0)


@pytest.mark.parametrize(
    ("size", "expected"), [(0, 0), (1, 32), (32, 32), (33, 64)], ids="0 1 32 33".split()
)
def test_padded(size, expected):
    assert padded(size) == expected


def test_file_layout():
    fields = [MetaField("a", ValueType.U32, 7)]
    tensors = [TensorInfo("x", "F32", (3,)), TensorInfo("y", "MXFP4", (1, 32))]
    header, places, size = encode_file(fields, tensors)
    assert header[:24] == b"GGUF" + struct.pack("<IQQ", 3, 2, 1)
    assert len(header) % 32 == 0
    assert len(header) == header_bytes(fields, tensors)
    start = len(header)
    assert places == {"x": (start, start + 12), "y": (start + 32, start + 49)}
    assert size == start + 64
    assert tensors[1].encode(32) in header


def test_file_without_tensors():
    header, places, size = encode_file([], [])
    assert (len(header), places, size) == (32, {}, 32)


@pytest.mark.parametrize("what", ["key", "tensor"])
def test_same_name_twice_is_a_programming_error(what):
    fields = [MetaField("k", ValueType.U32, 1)] * (2 if what == "key" else 1)
    tensors = [TensorInfo("t", "F32", (1,))] * (2 if what == "tensor" else 1)
    with pytest.raises(ValueError, match=f"{what} .: expected it once, got it twice"):
        encode_file(fields, tensors)
