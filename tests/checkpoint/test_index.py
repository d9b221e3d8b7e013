import gzip
import json
from pathlib import Path

import pytest

from k3quant.checkpoint.index import encode_index, parse_index
from k3quant.errors import StructureError


def test_real_index_has_every_tensor_and_the_payload(data: Path) -> None:
    raw = gzip.decompress((data / "kimi-k3" / "model.safetensors.index.json.gz").read_bytes())
    index = parse_index(raw)
    assert len(index.weight_map) == 497_220
    assert index.total_size == 1_560_860_324_864
    assert len(index.tensors_by_file()) == 96


def test_written_index_reads_back_sorted() -> None:
    raw = encode_index({"b": "y.safetensors", "a": "x.safetensors"}, 5)
    assert list(json.loads(raw)["weight_map"]) == ["a", "b"]
    assert parse_index(raw).total_size == 5


@pytest.mark.parametrize(
    "file",
    [
        pytest.param("../x.safetensors", id="parent"),
        pytest.param("a/../../x", id="inner-parent"),
        pytest.param("/etc/x", id="absolute"),
        pytest.param("a\\b", id="backslash"),
        pytest.param("C:x", id="drive"),
        pytest.param("", id="empty"),
    ],
)
def test_index_that_leaves_its_folder_is_refused(file: str) -> None:
    with pytest.raises(StructureError, match="inside the folder"):
        parse_index(json.dumps({"weight_map": {"a": file}}).encode())


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        pytest.param(b"{", "expected an object", id="no-json"),
        pytest.param(b"{}", "weight_map", id="no-map"),
        pytest.param(b'{"weight_map":{"a":1}}', "expected an object", id="number"),
        pytest.param(b'{"weight_map":{"a":"x","a":"y"}}', "`a` twice", id="name-twice"),
        pytest.param(b'{"\xff":1,"weight_map":{}}', "UTF-8", id="no-utf8-in-another-field"),
        pytest.param(b'{"weight_map": {"a" : "x","a" : "y"}}', "`a` twice", id="twice-spaced"),
        pytest.param(
            b'{"metadata":{"total_size":-1},"weight_map":{}}', "byte count", id="negative-size"
        ),
        pytest.param(
            b'{"metadata":{"total_size":"9"},"weight_map":{}}', "byte count", id="text-size"
        ),
    ],
)
def test_malformed_index_is_refused(raw: bytes, message: str) -> None:
    with pytest.raises(StructureError, match=message):
        parse_index(raw)


def test_whole_float_is_a_size_and_absence_is_legal() -> None:
    assert parse_index(b'{"metadata":{"total_size":9.0},"weight_map":{}}').total_size == 9
    assert parse_index(b'{"weight_map":{}}').total_size is None
