import json

import pytest

from k3quant.checkpoint.journal import JOURNAL_FILE
from k3quant.checkpoint.reader import open_checkpoint
from k3quant.errors import RefusedError, ResourceError, SchemaError, UsageError
from k3quant.models.k3_config import read_config
from k3quant.models.k3_tensors import tensors
from k3quant.synth import run as synth_run
from k3quant.synth.run import synth


@pytest.fixture(scope="module")
def config(nano):
    return json.loads((nano / "config.json").read_text())


def _files(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != JOURNAL_FILE}


def test_headers_are_those_of_the_release(config, nano, tmp_path):
    synth(config, tmp_path / "out", sparse=True)
    for path in nano.glob("*.safetensors"):
        made = (tmp_path / "out" / path.name).read_bytes()
        real = path.read_bytes()
        assert len(made) == len(real)
        start = 8 + int.from_bytes(real[:8], "little")
        assert made[:start] == real[:start]
        assert not any(made[start:])


def test_every_tensor_of_the_table_is_there(config, tmp_path):
    report = synth(config, tmp_path / "out", sparse=False, seed=5)
    checkpoint = open_checkpoint(tmp_path / "out")
    table = {spec.name: (spec.dtype, spec.shape) for spec in tensors(read_config(config))}
    assert {name: (e.dtype, e.shape) for name, e in checkpoint.entries.items()} == table
    assert checkpoint.config == config
    assert report.summary["tensors"] == len(table)
    assert checkpoint.index.total_size == report.summary["tensor_bytes"]


def test_a_note_says_that_there_is_no_tokenizer(config, tmp_path):
    synth(config, tmp_path / "out", sparse=True)
    assert "no tokenizer" in (tmp_path / "out" / "README.md").read_text()


def test_holes_take_no_room(config, tmp_path):
    config = json.loads(json.dumps(config))
    config["text_config"] |= {"hidden_size": 512}
    config["vision_config"] |= {"text_hidden_size": 512}
    report = synth(config, tmp_path / "out", sparse=True)
    real = sum(path.stat().st_blocks * 512 for path in (tmp_path / "out").iterdir())
    assert report.summary["file_bytes"] > 10_000_000
    assert real < 1_500_000


def test_the_seed_decides_every_byte_and_the_jobs_none(config, tmp_path):
    for name, seed, jobs in (("a", 1, 1), ("b", 1, 3), ("c", 2, 1)):
        synth(config, tmp_path / name, sparse=False, seed=seed, jobs=jobs)
    one, same, other = (_files(tmp_path / name) for name in "abc")
    assert one == same
    shards = [name for name in one if name.endswith(".safetensors")]
    assert all(one[name] != other[name] for name in shards)


def test_a_tensor_larger_than_a_piece_is_seamless(config, tmp_path, monkeypatch):
    synth(config, tmp_path / "whole", sparse=False)
    monkeypatch.setattr(synth_run, "_CHUNK_ELEMENTS", 1000)
    synth(config, tmp_path / "pieces", sparse=False)
    assert _files(tmp_path / "whole") == _files(tmp_path / "pieces")


def test_a_sparse_cut_is_a_whole_checkpoint(k3_config, tmp_path):
    report = synth(k3_config, tmp_path / "out", sparse=True, layers=(84, 92))
    checkpoint = open_checkpoint(tmp_path / "out")
    cut = read_config(checkpoint.config)
    assert cut.num_hidden_layers == 9
    assert len(checkpoint.headers) == 12
    assert len(checkpoint.entries) == report.summary["tensors"]
    assert json.loads((tmp_path / "out" / "k3quant.cut.json").read_text())["layers"] == [84, 92]


def test_a_run_that_was_cut_short_goes_on(config, tmp_path, monkeypatch):
    real = synth_run.ShardWriter
    written = []

    def note(path, *rest, **options):
        written.append(path.name)
        return real(path, *rest, **options)

    def stop(path, *rest, **options):
        if len(written) == 3:
            raise KeyboardInterrupt
        return note(path, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(synth_run, "ShardWriter", stop)
        with pytest.raises(KeyboardInterrupt):
            synth(config, tmp_path / "out", sparse=False, jobs=1)
    finished = {path.name for path in (tmp_path / "out").glob("*.safetensors")}
    assert len(finished) >= 3
    written.clear()
    monkeypatch.setattr(synth_run, "ShardWriter", note)
    synth(config, tmp_path / "out", sparse=False, jobs=1)
    assert len(written) == 12 - len(finished)
    assert finished.isdisjoint(written)
    synth(config, tmp_path / "whole", sparse=False)
    assert _files(tmp_path / "out") == _files(tmp_path / "whole")


@pytest.mark.parametrize(
    "change", [{"seed": 2}, {"sparse": True}, {"layers": (0, 2)}, {"experts": (0, 1)}]
)
def test_other_parameters_in_the_same_folder_are_refused(config, tmp_path, change):
    options = {"sparse": False, "seed": 1}
    synth(config, tmp_path / "out", **options)
    with pytest.raises(RefusedError, match="expected the parameters it was started with"):
        synth(config, tmp_path / "out", **options | change)


def test_a_full_disk_is_told_first_unless_sparse(config, tmp_path):
    with pytest.raises(ResourceError, match="short") as caught:
        synth(config, tmp_path / "out", sparse=False, free=lambda _: 1000)
    assert "--sparse" in caught.value.hint
    assert not (tmp_path / "out").exists()
    synth(config, tmp_path / "out", sparse=True, free=lambda _: 1000)


@pytest.mark.parametrize(
    ("change", "options", "error"),
    [
        pytest.param({"model_type": "llama"}, {}, SchemaError, id="another model"),
        pytest.param({}, {"layers": (0, 9)}, UsageError, id="too many layers"),
        pytest.param({}, {"device": "tpu"}, UsageError, id="another device"),
    ],
)
def test_what_cannot_be_made_is_refused(config, tmp_path, change, options, error):
    with pytest.raises(error):
        synth(config | change, tmp_path / "out", sparse=True, **options)
    assert not (tmp_path / "out").exists()
