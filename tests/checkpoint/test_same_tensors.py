from pathlib import Path

import pytest
from typer.testing import CliRunner

from k3quant.checkpoint.reader import open_checkpoint
from k3quant.checkpoint.same_tensors import compare_tensors
from k3quant.cli.main import app
from k3quant.repack.run import run_repack
from k3quant.repack.settings import RepackSettings


@pytest.fixture
def repacked(nano: Path, tmp_path: Path) -> Path:
    run_repack(nano, tmp_path / "out", RepackSettings(max_shard_bytes=1 << 20))
    return tmp_path / "out"


def test_a_repack_holds_the_same_tensors_in_other_files(nano: Path, repacked: Path) -> None:
    found = compare_tensors(open_checkpoint(nano), open_checkpoint(repacked))
    assert (found.changes, found.tensors, found.same_files) == ((), 1788, False)
    done = CliRunner().invoke(app, ["manifest", "diff", str(nano), str(repacked)])
    assert done.exit_code == 0
    assert "same tensors, same bytes, other files: 1,788 tensors" in done.output


def test_one_flipped_bit_is_named(nano: Path, repacked: Path) -> None:
    checkpoint = open_checkpoint(repacked)
    name = "language_model.model.layers.2.self_attn.q_proj.weight"
    entry = checkpoint.entry(name)
    with (repacked / entry.file).open("r+b") as file:
        file.seek(entry.offset + 77)
        (byte,) = file.read(1)
        file.seek(entry.offset + 77)
        file.write(bytes([byte ^ 1]))
    (change,) = compare_tensors(open_checkpoint(nano), open_checkpoint(repacked)).changes
    assert (change.name, change.what) == (name, "byte 77")
    assert (change.before, change.after) == (str(byte), str(byte ^ 1))
    done = CliRunner().invoke(app, ["manifest", "diff", str(nano), str(repacked)])
    assert done.exit_code == 1


def test_missing_and_reshaped_tensors_are_named(nano: Path, oracle: Path) -> None:
    found = compare_tensors(open_checkpoint(nano), open_checkpoint(oracle))
    whats = {change.what for change in found.changes}
    assert {"tensor", "kind"} <= whats
