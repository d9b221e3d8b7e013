import json

import pytest

from k3quant.checkpoint.header import encode_header
from k3quant.checkpoint.reader import open_checkpoint
from k3quant.errors import ExitCode, IncompleteError, StructureError
from k3quant.repack.rebuild import rebuild_index
from k3quant.repack.run import run_repack
from k3quant.repack.settings import RepackSettings

INDEX = "model.safetensors.index.json"


def _wrong_total(index):
    index["metadata"]["total_size"] += 1


def _stale(index):
    index["weight_map"] = {
        name: f"model-{number % 30:05d}-of-000030.safetensors"
        for number, name in enumerate(index["weight_map"])
    }


@pytest.mark.parametrize("damage", [None, _wrong_total, _stale], ids=["none", "total", "stale"])
def test_an_index_is_rebuilt_whatever_was_there(tiny, damage):
    path = tiny / INDEX
    right = json.loads(path.read_text())
    if damage is None:
        path.unlink()
    else:
        index = json.loads(path.read_text())
        damage(index)
        path.write_text(json.dumps(index))
    report = rebuild_index(tiny)
    assert json.loads(path.read_text()) == right
    assert report.summary["tensors"] == len(right["weight_map"])
    assert report.summary["shards"] == sorted(set(right["weight_map"].values()))
    open_checkpoint(tiny)


def test_a_repack_can_trust_the_headers_instead_of_the_index(tiny, tmp_path, digests):
    before = digests(tiny)
    (tiny / INDEX).write_text("no index")
    run_repack(tiny, tmp_path / "out", RepackSettings(rebuild_index=True, max_shard_bytes=60_000))
    assert digests(tmp_path / "out") == before


def test_work_in_place_can_trust_the_headers_too(tiny, digests):
    before = digests(tiny)
    (tiny / INDEX).unlink()
    settings = RepackSettings(rebuild_index=True, in_place=True, max_shard_bytes=60_000)
    run_repack(tiny, tiny, settings)
    assert digests(tiny) == before


def test_a_missing_number_is_refused(tiny):
    (tiny / "model-00003-of-000007.safetensors").unlink()
    with pytest.raises(IncompleteError, match=r"expected 7 files .*got 6; missing numbers \[3\]"):
        rebuild_index(tiny)


def test_a_folder_without_shards_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(IncompleteError, match="expected shards to index, got none"):
        rebuild_index(tmp_path)


def test_modules_without_tensors_are_refused(tiny, tmp_path):
    out = tmp_path / "out"
    run_repack(tiny, out, RepackSettings(max_shard_bytes=10**9))
    config = json.loads((out / "config.json").read_text())
    config["text_config"]["num_experts"] = 6
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(IncompleteError, match=r"first language_model.*\.experts\.5\.w1") as caught:
        rebuild_index(out)
    assert caught.value.exit_code is ExitCode.INCOMPLETE


def test_a_tensor_in_two_files_is_refused(cases, tmp_path):
    with pytest.raises(
        StructureError, match=r"expected it in one file, got it in model-0000.* and"
    ):
        rebuild_index(cases / "V14")
    assert "model.safetensors" in (cases / "V14" / "model.safetensors").name


def test_without_a_table_the_files_alone_decide(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    header, _ = encode_header([("a", "U8", (2,))])
    (tmp_path / "x.safetensors").write_bytes(header + b"ab")
    header, _ = encode_header([("b", "U8", (2,))])
    (tmp_path / "y.safetensors").write_bytes(header + b"cd")
    rebuild_index(tmp_path)
    assert open_checkpoint(tmp_path).read("b").tobytes() == b"cd"
