import hashlib
import json
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3quant.checkpoint.header import encode_header
from k3quant.checkpoint.reader import open_checkpoint
from k3quant.repack.run import run_repack
from k3quant.repack.settings import Layout, RepackSettings
from k3quant.synth.run import synth


def _with_metadata(folder: Path, metadata: dict[str, str]) -> None:
    """Write every shard anew with a `__metadata__`."""
    checkpoint = open_checkpoint(folder)
    for file, header in checkpoint.headers.items():
        entries = [(name, e.dtype, e.shape) for name, e in header.tensors.items()]
        new, _ = encode_header(entries, metadata=metadata)
        raw = (folder / file).read_bytes()
        (folder / file).write_bytes(new + raw[header.data_start :])


@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
@pytest.mark.parametrize("in_place", [False, True], ids=["into folders", "in place"])
def test_size_then_layer_then_ranks_then_original_leads_back(
    in_place, data, tiny_config, digests, files, monkeypatch
):
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # what is durable is tested elsewhere
    experts = data.draw(st.integers(1, 12), label="experts")
    config = tiny_config(
        kinds=data.draw(st.text("KM", min_size=1, max_size=4), label="kinds"),
        experts=experts,
        hidden=data.draw(st.sampled_from([8, 32, 40]), label="hidden"),
        block=data.draw(st.sampled_from([None, 2]), label="block"),
        dense=data.draw(st.integers(0, 2), label="dense"),
        vision=data.draw(st.booleans(), label="vision"),
        packed=data.draw(st.booleans(), label="packed"),
    )
    metadata = data.draw(st.sampled_from([{}, {"format": "pt"}, {"作者": '"\\'}]), label="metadata")
    limit = data.draw(st.integers(2000, 200_000), label="limit")
    ranks = data.draw(st.integers(1, experts), label="ranks")
    align = data.draw(st.sampled_from([8, 64, 4096]), label="align")
    chain = [
        {"max_shard_bytes": limit, "align": align},
        {"layout": Layout.LAYER, "max_shard_bytes": data.draw(st.sampled_from([None, limit]))},
        {"layout": Layout.RANK, "ranks": ranks},
        {"layout": Layout.ORIGINAL},
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "0"
        synth(config, folder, sparse=False, seed=data.draw(st.integers(0, 9), label="seed"))
        (folder / ".k3quant-journal.jsonl").unlink()
        if metadata:
            _with_metadata(folder, metadata)
        before, first = digests(folder), files(folder)
        for number, options in enumerate(chain, start=1):
            out = folder if in_place else Path(name) / str(number)
            run_repack(folder, out, RepackSettings(**options, in_place=in_place))
            folder = out
            assert digests(folder) == before
        assert files(folder) == first


def test_the_chain_keeps_what_is_not_in_the_table(cases, tmp_path, digests):
    source = cases / "R10"
    before = digests(source)
    for number, options in enumerate(
        [
            {"max_shard_bytes": 20_000},
            {"layout": Layout.LAYER},
            {"layout": Layout.RANK, "ranks": 2},
            {"layout": Layout.ORIGINAL},
        ]
    ):
        out = tmp_path / str(number)
        run_repack(source, out, RepackSettings(**options))
        assert digests(out) == before
        source = out
    total = json.loads((source / "model.safetensors.index.json").read_text())["metadata"]
    assert total["total_size"] == sum(e.length for e in open_checkpoint(source).entries.values())
    assert before["extra.empty"] == ("BF16", (0, 64), hashlib.sha256(b"").hexdigest())
