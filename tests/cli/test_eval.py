"""`k3quant eval` and `k3quant report`: options, what is printed, files, exit codes."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from k3quant.cli.main import app


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def document(*words: str | Path, code: int = 0) -> dict[str, Any]:
    result = run(*words, "--json")
    assert result.exit_code == code, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    np.save(tmp_path / "ids.npy", np.arange(40))
    return tmp_path / "ids.npy"


def test_every_number_has_its_noise_beside_it(nano: Path, ids: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    words = ("eval", nano, "--tokens", ids, "--reference", nano, "--noise-floor", "--html", page)
    result = run(*words)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("(noise ") == 3
    assert "no larger than rounding" in result.stdout
    assert "worst layer  none" in result.stdout
    assert "reference's top-1" in result.stdout
    assert page.read_text().startswith("<!doctype html>")


def test_the_worst_layer_is_printed_with_its_halves(nano: Path, ids: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(nano, tmp_path / "copy"))
    for shard in sorted(folder.glob("*.safetensors")):
        tensors = load_file(shard)
        names = [name for name in tensors if ".layers.4." in name and "experts" in name]
        for name in names:
            if name.endswith("weight_scale"):
                tensors[name] += 1
        if names:
            save_file(tensors, shard)
    result = run("eval", folder, "--tokens", ids, "--reference", nano)
    assert "worst layer  4: on the reference's input relative error" in result.stdout
    assert "attention 0, MLP" in result.stdout
    without = run(
        "eval", folder, "--tokens", ids, "--reference", nano, "--no-teacher-forced"
    ).stdout
    assert "worst layer  " not in without
    assert ": relative error" in without


def test_layers_have_the_published_keys(nano: Path, ids: Path) -> None:
    found = document("eval", nano, "--tokens", ids, "--reference", nano, "--noise-floor")["summary"]
    assert found.keys() >= {
        "checkpoint", "checkpoint_bytes", "reference", "reference_bytes", "kld_median", "kld_p90",
        "kld_max", "kld_by_confidence", "kld_histogram", "noise_floor", "worst_layer",
    }  # fmt: skip
    first, second = found["layers"][:2]
    assert first.keys() == {
        "layer", "rel_error", "cosine", "sqnr_db", "attention", "mlp",
        "forced_rel_error", "forced_cosine", "forced_sqnr_db",
    }  # fmt: skip
    assert second.keys() - first.keys() == {"router_agreement", "router_load"}
    assert first["mlp"].keys() == first.keys() - {"layer", "attention", "mlp"}
    assert found["checkpoint_bytes"] == found["reference_bytes"] > 7_000_000


def test_a_state_is_taken_up_and_another_option_refused(
    nano: Path, ids: Path, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    first = document("eval", nano, "--tokens", ids, "--state", state)["summary"]
    again = document("eval", nano, "--tokens", ids, "--state", state)["summary"]
    assert (again["resumed_after"], again["nll_mean"]) == (8, first["nll_mean"])
    assert "resumed" in run("eval", nano, "--tokens", ids, "--state", state).stdout
    found = document("eval", nano, "--tokens", ids, "--state", state, "--ctx", "8", code=9)
    assert "parameters it was started with" in found["findings"][0]["message"]


def test_kept_states_are_scored_without_a_walk(nano: Path, ids: Path, tmp_path: Path) -> None:
    kept = tmp_path / "hidden.safetensors"
    walked = document("eval", nano, "--tokens", ids, "--save-hidden", kept)["summary"]
    alone = document("eval", nano, "--hidden", kept)["summary"]
    assert (alone["nll_mean"], alone["tokens_scored"]) == (walked["nll_mean"], 39)
    both = ("eval", nano, "--hidden", kept, "--reference", nano, "--reference-hidden", kept)
    assert document(*both)["summary"]["kld_max"] == 0
    assert "top-1 1.0000" in run(*both).stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--noise-floor", "--tokens", "IDS"], "expected a reference"),
        (["--hidden", "x", "--tokens", "IDS"], "expected one of --text"),
        (["--hidden", "x", "--html", "y"], "expected neither"),
        (["--hidden", "x", "--reference-hidden", "y"], "--reference with --reference-hidden"),
        (["--reference-hidden", "y"], "expected --hidden"),
    ],
    ids=["floor-alone", "two-inputs", "no-page", "no-reference", "no-states"],
)
def test_options_that_do_not_fit_are_refused(
    nano: Path, ids: Path, words: list[str], message: str
) -> None:
    found = document("eval", nano, *(ids if word == "IDS" else word for word in words), code=2)
    assert message in found["findings"][0]["message"]


def test_reports_are_laid_side_by_side(nano: Path, ids: Path, tmp_path: Path) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path in paths:
        run("eval", nano, "--tokens", ids, "--reference", nano, "--out", path)
    page = tmp_path / "page.html"
    result = run("report", *paths, "--html", page)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("nano ") == 2
    assert "Size against damage" in page.read_text()
    rows = document("report", *paths)["summary"]["reports"]
    assert [row["file"] for row in rows] == ["a.json", "b.json"]
    assert [row["kld_mean"] for row in rows] == [0, 0]
    assert document("report", tmp_path / "c.json", code=3)["findings"]
