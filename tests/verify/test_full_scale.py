"""The whole release, as headers with holes behind them: 96 shards, 1.56 TB, 497,220 tensors."""

import os
from pathlib import Path

import pytest

from k3quant.checkpoint.folder import LocalFolder
from k3quant.manifest import load_config, load_manifest
from k3quant.report import Severity
from k3quant.synth.run import synth
from k3quant.verify.run import Level, VerifySettings, verify

SHARD = "model-00057-of-000096.safetensors"


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sparse") / "kimi-k3"
    synth(load_config("kimi-k3"), folder, sparse=True)
    return folder


def test_sparse_release_passes_and_one_renamed_tensor_is_found(sparse: Path) -> None:
    settings = VerifySettings(level=Level.SCHEMA, manifest=load_manifest("kimi-k3"))
    report = verify(LocalFolder(sparse), settings)
    assert report.exit_code == 0, [f.message for f in report.findings]
    assert report.summary["tensors"] == 497_220

    fd = os.open(sparse / SHARD, os.O_RDWR)
    header = os.pread(fd, 1_000_000, 8)
    place = header.index(b"experts.711.w3.weight_scale")
    os.pwrite(fd, b"experts.711.x3.weight_scale", 8 + place)
    os.close(fd)

    report = verify(LocalFolder(sparse), VerifySettings(level=Level.SCHEMA))
    assert report.exit_code == 4
    messages = [f.message for f in report.findings if f.severity is Severity.ERROR]
    assert any("layers.56" in text and "experts.711.w3" in text for text in messages)
    assert any(SHARD in text for text in messages)
