import json
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3quant.checkpoint.header import HeaderScan, encode_header, scan_header
from k3quant.report import Severity

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\nsize 5\n"


def file_of(document: object, payload: bytes = b"", *, tail: bytes = b"") -> bytes:
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + payload + tail


def scan(raw: bytes) -> HeaderScan:
    return scan_header(
        lambda offset, length: raw[offset : offset + length], file="s", file_bytes=len(raw)
    )


def codes(raw: bytes) -> list[str]:
    return [f.code for f in scan(raw).findings if f.severity is Severity.ERROR]


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_healthy_file_has_no_findings_and_all_entries() -> None:
    raw = file_of({"a": entry("U8", [2, 3], 0, 6), "b": entry("F32", [], 6, 10)}, bytes(10))
    found = scan(raw)
    assert found.findings == ()
    assert found.header is not None
    assert found.header.tensors["a"] == ("U8", (2, 3), 0, 6)
    assert found.header.data_start + 10 == len(raw)


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        pytest.param(b"", "too-small", id="empty"),
        pytest.param(b"\x10\0\0\0\0", "too-small", id="five-bytes"),
        pytest.param(struct.pack("<Q", 2**63 - 1) + b"{}", "bad-header-length", id="absurd-length"),
        pytest.param(struct.pack(">Q", 8) + b"{}      ", "byte-swapped-length", id="big-endian"),
        pytest.param(struct.pack("<Q", 100) + b'{"a":', "short-header", id="cut-in-header"),
        pytest.param(
            b"version https://git-lfs.github.com/spec/v1\nsize 5\n", "lfs-pointer", id="lfs"
        ),
        pytest.param(b"<html>too many requests</html>", "not-safetensors", id="error-page"),
        pytest.param(file_of(b"[1]"), "bad-json", id="no-object"),
        pytest.param(file_of(b'{"a" 1}'), "bad-json", id="no-json"),
        pytest.param(file_of(b'{"a":' * 5000), "bad-json", id="deep-nesting"),
        pytest.param(file_of(b'{"\xff":{}}'), "bad-utf8", id="no-utf8"),
        pytest.param(
            file_of(b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
            "bad-utf8",
            id="lone-surrogate",
        ),
        pytest.param(file_of({"a": {"dtype": "U8"}}), "bad-entry", id="field-absent"),
        pytest.param(
            file_of({"a": entry("U8", [1], 0, 1) | {"x": 1}}, b"1"), "bad-entry", id="field-extra"
        ),
        pytest.param(file_of({"a": entry("U8", [1.0], 0, 1)}, b"1"), "bad-shape", id="float-size"),
        pytest.param(
            file_of({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 2]}}, b"1"),
            "bad-offsets",
            id="three-offsets",
        ),
        pytest.param(
            file_of(
                b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
                b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
                b"1",
            ),
            "duplicate-key",
            id="name-twice",
        ),
        pytest.param(
            file_of(b'{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}', b"1"),
            "duplicate-key",
            id="field-twice",
        ),
        pytest.param(file_of({"__metadata__": {"n": 7}}), "bad-metadata", id="number-metadata"),
        pytest.param(file_of({"__metadata__": []}), "bad-metadata", id="list-metadata"),
        pytest.param(file_of({"a": entry("Q9", [1], 0, 1)}, b"1"), "unknown-dtype", id="dtype"),
        pytest.param(file_of({"a": entry("U8", [-1], 0, 1)}, b"1"), "bad-shape", id="negative"),
        pytest.param(
            file_of({"a": entry("U8", [3], 0, 2)}, b"12"), "shape-bytes", id="shape-bytes"
        ),
        pytest.param(
            file_of({"a": entry("U8", [2**33, 2**33], 0, 2)}, b"12"), "shape-bytes", id="overflow"
        ),
        pytest.param(file_of({"a": entry("F4", [3], 0, 1)}, b"1"), "shape-bytes", id="half-byte"),
        pytest.param(
            file_of({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, b"123"),
            "overlap",
            id="overlap",
        ),
        pytest.param(
            file_of({"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 2, 3)}, b"123"),
            "hole",
            id="hole",
        ),
        pytest.param(file_of({"a": entry("U8", [9], 0, 9)}, b"12"), "short-file", id="short"),
        pytest.param(file_of({"a": entry("U8", [1], 0, 1)}, b"12"), "trailing-bytes", id="long"),
        pytest.param(file_of({"a": entry("U8", [1], 1, 0)}, b""), "bad-offsets", id="backwards"),
    ],
)
def test_fault_is_named(raw: bytes, code: str) -> None:
    assert code in codes(raw)


def test_unknown_dtype_still_has_its_range_checked() -> None:
    raw = file_of({"a": entry("Q9", [1], 0, 5)}, b"12")
    assert set(codes(raw)) == {"unknown-dtype", "short-file"}


def test_absurd_length_is_refused_before_anything_is_read() -> None:
    asked: list[int] = []

    def fetch(offset: int, length: int) -> bytes:
        asked.append(length)
        return struct.pack("<Q", 1 << 62)[:length]

    scan_header(fetch, file="s", file_bytes=1 << 63)
    assert max(asked) <= 1024


def test_short_file_names_the_first_lost_tensor_and_both_sizes() -> None:
    raw = file_of({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 4, 8)}, b"12345")
    (finding,) = scan(raw).findings
    assert "short by 3 bytes" in finding.message
    assert "first tensor past the end is b" in finding.message
    assert (finding.expected, finding.got) == (len(raw) + 3, len(raw))


def test_written_header_is_the_format_writers_own(tmp_path: Path) -> None:
    np = pytest.importorskip("numpy")
    save_file = pytest.importorskip("safetensors.numpy").save_file
    tensors = {
        "b.10": np.zeros((2, 3), np.float32),
        "b.2": np.zeros((4,), np.uint8),
        "a": np.zeros((), np.int64),
        "é": np.zeros((0, 5), np.uint8),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    raw = (tmp_path / "x.safetensors").read_bytes()
    names = {"float32": "F32", "uint8": "U8", "int64": "I64"}
    ours, placed = encode_header((n, names[str(t.dtype)], t.shape) for n, t in tensors.items())
    assert raw.startswith(ours)
    assert placed["b.10"].begin == 8


@pytest.mark.parametrize("align", [8, 64, 4096])
def test_data_section_starts_aligned_by_padding_alone(align: int) -> None:
    header, _ = encode_header([("a", "U8", (3,))], align=align)
    assert len(header) % align == 0
    assert codes(header + b"123") == []


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_any_bytes_give_findings_never_an_exception(raw: bytes) -> None:
    found = scan(raw)
    assert found.header is not None or found.findings


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_any_damage_to_a_header_gives_findings_or_a_checked_layout(data: st.DataObject) -> None:
    raw = bytearray(
        file_of({"a": entry("U8", [2, 3], 0, 6), "b": entry("F32", [1], 8 - 2, 10)}, bytes(10))
    )
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 11))] = data.draw(st.integers(0, 255))
    found = scan(bytes(raw))
    if not found.findings:
        assert found.header is not None
        ends = sorted((e.begin, e.end) for e in found.header.tensors.values())
        assert ends[-1][1] + found.header.data_start == len(raw)
