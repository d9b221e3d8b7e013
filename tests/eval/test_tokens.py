import hashlib

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file

from k3quant.errors import (
    IncompleteError,
    K3QuantError,
    SchemaError,
    StructureError,
    UsageError,
)
from k3quant.eval.tokens import check_ids, digest_ids, encode_text, read_documents
from k3quant.models.tokenizer import Tokenizer


def _lists(path):
    return [ids.tolist() for ids in read_documents(path)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_safetensors_of_one_or_many_documents(tmp_path, dtype):
    path = tmp_path / "ids.safetensors"
    save_file({"input_ids": torch.tensor([1, 2, 3], dtype=dtype), "other": torch.ones(2)}, path)
    assert _lists(path) == [[1, 2, 3]]
    save_file({"input_ids": torch.tensor([[1, 2], [3, 4]], dtype=dtype)}, path)
    assert _lists(path) == [[1, 2], [3, 4]]


def test_npy_of_one_or_many_documents(tmp_path):
    path = tmp_path / "ids.npy"
    np.save(path, np.array([1, 2, 3], dtype=np.uint16))
    assert _lists(path) == [[1, 2, 3]]
    np.save(path, np.array([[1, 2], [3, 4]]))
    assert _lists(path) == [[1, 2], [3, 4]]


def test_json_lines_are_documents_of_any_length(tmp_path):
    path = tmp_path / "ids.jsonl"
    path.write_text("[1, 2, 3]\n\n[4]\n[]\n")
    assert _lists(path) == [[1, 2, 3], [4], []]


def _save_floats(path):
    save_file({"input_ids": torch.ones(3)}, path)


def _save_other(path):
    save_file({"ids": torch.ones(3, dtype=torch.int64)}, path)


def _save_cube(path):
    save_file({"input_ids": torch.ones(1, 2, 3, dtype=torch.int64)}, path)


@pytest.mark.parametrize(
    ("name", "write", "error", "words"),
    [
        pytest.param("a.bin", lambda p: p.touch(), UsageError, "safetensors", id="foreign-name"),
        pytest.param("a.jsonl", lambda p: None, IncompleteError, "a.jsonl", id="missing"),
        pytest.param("a.safetensors", _save_floats, SchemaError, "integers, got F32", id="floats"),
        pytest.param("a.safetensors", _save_other, SchemaError, "input_ids", id="other-name"),
        pytest.param("a.safetensors", _save_cube, SchemaError, "[1, 2, 3]", id="three-axes"),
        pytest.param(
            "a.safetensors", lambda p: p.write_bytes(b"abc"), K3QuantError, "a.safetensors",
            id="no-header",
        ),
        pytest.param(
            "a.npy", lambda p: p.write_bytes(b"abc"), StructureError, "a.npy", id="no-array"
        ),
        pytest.param(
            "a.npy", lambda p: np.save(p, np.ones(3)), SchemaError, "integers", id="float-array"
        ),
        pytest.param(
            "a.jsonl", lambda p: p.write_text("[1]\n[2"), StructureError, "line 2", id="no-json"
        ),
        pytest.param(
            "a.jsonl", lambda p: p.write_text("[1, true]"), SchemaError, "line 1", id="booleans"
        ),
        pytest.param(
            "a.jsonl", lambda p: p.write_text('{"a": 1}'), SchemaError, "line 1", id="no-list"
        ),
        pytest.param(
            "a.jsonl", lambda p: p.write_text(f"[{2**70}]"), SchemaError, "line 1", id="huge-id"
        ),
    ],
)  # fmt: skip
def test_a_file_that_is_no_ids_is_refused(tmp_path, name, write, error, words):
    path = tmp_path / name
    write(path)
    with pytest.raises(error) as caught:
        read_documents(path)
    assert words in caught.value.message


@pytest.mark.parametrize("bad", [-1, 608, 2**40])
def test_an_id_outside_the_vocabulary_is_named_with_its_place(bad):
    documents = (np.array([1, 2]), np.array([3, bad, 4]))
    with pytest.raises(SchemaError, match=rf"ids: document 1, position 1: .*0 to 607, got {bad}"):
        check_ids(documents, vocab_size=608, label="ids")


def test_digest_depends_on_ids_and_on_where_documents_end():
    whole, parts = (np.array([1, 2, 3]),), (np.array([1, 2]), np.array([3]))
    expected = hashlib.sha256(
        b"".join(number.to_bytes(8, "little") for number in (3, 1, 2, 3))
    ).hexdigest()
    assert digest_ids(whole) == expected
    assert digest_ids(whole) != digest_ids(parts)
    assert digest_ids(whole) == digest_ids((np.array([1, 2, 3], dtype=np.int32),))


def test_control_tokens_inside_a_text_are_text(tmp_path, oracle):
    path = tmp_path / "text.txt"
    path.write_text("ab<|end_of_msg|>c")
    (ids,) = encode_text(path, Tokenizer.load(oracle))
    assert (ids < 352).all()


def test_the_bundled_text_has_the_golden_ids(nano, data):
    golden = load_file(data / "nano" / "golden_ppl.safetensors")["input_ids"]
    (ids,) = encode_text(nano / "eval.txt", Tokenizer.load(nano))
    assert np.array_equal(ids, golden)
