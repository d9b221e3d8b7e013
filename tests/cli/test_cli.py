"""The command line: one document under --json, exit codes of design, errors that say what to do."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from k3quant.cli.main import app


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def document(*words: str | Path, code: int = 0) -> dict[str, Any]:
    result = run(*words, "--json")
    assert result.exit_code == code, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    assert found.keys() == {"command", "version", "ok", "exit_code", "findings", "summary"}
    assert found["exit_code"] == code
    return found


def test_inspect_prints_the_four_numbers() -> None:
    summary = document("inspect", "kimi-k3")["summary"]
    assert summary["tensors"] == 497_220
    assert summary["parameters"] == 2_779_931_837_184
    assert summary["active_parameters"] == 104_189_614_848
    assert summary["tensor_bytes"] == 1_560_860_324_864


def test_inspect_of_a_config_equals_that_of_the_profile(tmp_path: Path, k3_config: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(k3_config))
    ours = document("inspect", tmp_path / "config.json")["summary"]
    theirs = document("inspect", "kimi-k3")["summary"]
    for key in ("tensors", "parameters", "families", "shards", "layers"):
        assert ours[key] == theirs[key]


def test_inspect_of_a_folder_counts_its_scales(nano: Path) -> None:
    summary = document("inspect", nano, "--scales")["summary"]
    assert summary["stored_tensors"] == summary["tensors"] == 1788
    assert sum(summary["scales"]["w1"].values()) == 8 * 32 * 96 * 2
    assert "KDA" in run("inspect", nano).stdout


def test_verify_of_a_healthy_folder_is_quiet_when_asked(nano: Path) -> None:
    assert document("verify", nano)["ok"]
    result = run("verify", nano, "--quiet")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("case", "code"), [("D01", 3), ("V12", 3), ("V01", 3), ("V02", 4), ("V17", 6), ("D02", 5),
                       ("V19", 7), ("V29", 8)]
)  # fmt: skip
def test_verify_exits_with_the_class_of_the_fault(cases: Path, case: str, code: int) -> None:
    found = document("verify", cases / case, code=code)
    assert not found["ok"]
    result = run("verify", cases / case)
    assert result.exit_code == code
    assert "error:" in result.stderr


def test_verify_names_the_command_that_repairs(cases: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "m.json"
    assert run("manifest", "create", cases / "base", "--out", manifest).exit_code == 0
    text = json.loads(manifest.read_text())
    text["repository"] = "owner/name"
    manifest.write_text(json.dumps(text))
    result = run("verify", cases / "D02", "--manifest", manifest)
    assert result.exit_code == 5
    assert "k3quant download owner/name" in result.stdout
    assert "--include model-00002-of-000003.safetensors" in result.stdout
    assert "model-00001" not in result.stdout.rpartition("repair:")[2]


def test_manifest_diff_exits_1_on_differences(cases: Path, tmp_path: Path) -> None:
    for case in ("base", "D02"):
        assert run("manifest", "create", cases / case, "--out", tmp_path / case).exit_code == 0
    assert document("manifest", "diff", tmp_path / "base", tmp_path / "base")["ok"]
    found = document("manifest", "diff", tmp_path / "base", tmp_path / "D02", code=1)
    assert [f["subject"] for f in found["findings"]] == ["model-00002-of-000003.safetensors"]
    assert document("manifest", "show", "kimi-k3")["summary"]["totals"]["tensors"] == 497_220


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        pytest.param(["verify", "NOWHERE"], 3, "got nothing", id="no-folder"),
        pytest.param(["verify", "NANO", "--level", "deep"], 2, "expected headers", id="level"),
        pytest.param(["verify", "NANO", "--manifest", "x"], 2, "built-in name", id="manifest"),
        pytest.param(["inspect", "NOWHERE"], 3, "built-in name", id="nothing-to-inspect"),
        pytest.param(["eval", "NANO"], 2, "one of a text", id="eval-without-text"),
        pytest.param(["convert", "NANO", "--out", "OUT", "--to", "int3"], 2, "--to", id="format"),
        pytest.param(
            ["requantize", "NANO", "--out", "OUT", "--recipe", "x"], 2, "recipe x", id="recipe"
        ),
        pytest.param(["repack", "NANO"], 2, "--out", id="repack-without-out"),
        pytest.param(
            ["repack", "NANO", "--out", "OUT", "--layers", "3-1"], 2, "--layers", id="range"
        ),
        pytest.param(["synth", "--out", "OUT", "--profile", "x"], 2, "profile x", id="profile"),
        pytest.param(["download", "nonsense", "--out", "OUT"], 2, "nonsense", id="repository"),
    ],
)
def test_wrong_words_are_refused_with_a_way_out(
    words: list[str], code: int, message: str, nano: Path, tmp_path: Path
) -> None:
    places = {"NANO": nano, "NOWHERE": tmp_path / "nowhere", "OUT": tmp_path / "out"}
    result = run(*(places.get(word, word) for word in words))
    assert result.exit_code == code, result.output
    assert message in result.stderr
    found = document(*(places.get(word, word) for word in words), code=code)
    assert message in found["findings"][0]["message"] + found["findings"][0]["hint"]


def test_eval_refuses_texts_with_nothing_to_score(nano: Path, tmp_path: Path) -> None:
    for text in ("", "a"):
        (tmp_path / "t.txt").write_text(text)
        found = document("eval", nano, "--text", tmp_path / "t.txt", code=3)
        assert "nothing to score" in found["findings"][0]["message"]


def test_eval_refuses_a_config_without_its_activation_bound(nano: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(nano, tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    del config["text_config"]["activation_situ_beta"]
    (copy / "config.json").write_text(json.dumps(config))
    found = document("eval", copy, "--text", nano / "eval.txt", code=6)
    assert "activation_situ_beta" in found["findings"][0]["message"]


@pytest.mark.parametrize(("case", "code"), [("V12", 3), ("D01", 3), ("V01", 3)])
def test_eval_refuses_a_broken_checkpoint(
    cases: Path, tmp_path: Path, case: str, code: int
) -> None:
    np.save(tmp_path / "ids.npy", np.arange(8))
    document("eval", cases / case, "--tokens", tmp_path / "ids.npy", code=code)


def test_eval_summary_has_the_published_keys(nano: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(40))
    report = tmp_path / "report.json"
    found = document(
        "eval", nano, "--tokens", tmp_path / "ids.npy", "--reference", nano, "--out", report
    )
    keys = {
        "tokens_scored", "nll_mean", "ppl", "context", "stride", "dtype", "seconds", "bytes_read",
        "kld_mean", "kld_p99", "top1_agreement", "router_agreement", "layers",
    }  # fmt: skip
    assert keys <= found["summary"].keys()
    assert found["summary"]["kld_mean"] == 0
    assert found["summary"]["layers"][0].keys() >= {"layer", "rel_error", "cosine"}
    assert json.loads(report.read_text())["summary"]["ppl"] == found["summary"]["ppl"]


def test_trace_writes_the_named_tensors(oracle: Path, tmp_path: Path) -> None:
    from safetensors import safe_open

    np.save(tmp_path / "ids.npy", np.arange(12))
    out = tmp_path / "t.safetensors"
    document("trace", oracle, "--tokens", tmp_path / "ids.npy", "--out", out)
    with safe_open(out, "np") as reader:
        names = set(reader.keys())
    assert {"logits", "final_hidden", "layers.0.out", "layers.3.mla_k_rope"} <= names


def test_convert_dry_run_writes_nothing(nano: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    summary = document("convert", nano, "--out", out, "--to", "nvfp4", "--dry-run")["summary"]
    assert not out.exists()
    routed = next(f for f in summary["families"] if f["family"] == "routed experts")
    assert routed["exact"] == "768 of 768"


def test_convert_then_verify_then_refuse_other_parameters(nano: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert document("convert", nano, "--out", out, "--to", "nvfp4")["summary"]["exact"]
    assert document("verify", out)["summary"]["manifest"] == "k3quant.proof.json"
    document("convert", nano, "--out", out, "--to", "bf16", code=9)
    document("convert", nano, "--out", tmp_path / "b", "--to", "int4", "--require-lossless", code=9)


def test_repack_and_synth_print_their_numbers(nano: Path, tmp_path: Path) -> None:
    found = document("repack", nano, "--out", tmp_path / "r", "--max-shard-size", "1MB")
    assert found["summary"]["tensors"] == 1788
    assert document("verify", tmp_path / "r")["ok"]
    document("synth", "--profile", "nano", "--out", tmp_path / "s", "--sparse")
    assert document("verify", tmp_path / "s", "--level", "schema")["ok"]


def test_every_command_has_help_with_an_example() -> None:
    listing = run("--help").stdout
    names = [command.name or command.callback.__name__ for command in app.registered_commands]  # type: ignore[union-attr]
    assert len(names) >= 11
    for name in names:
        assert name in listing
        text = run(name, "--help").stdout
        assert "Example: k3quant" in text
        assert "--json" in text
        assert "--quiet" in text


def test_readme_documents_every_command() -> None:
    readme = (Path(__file__).parent.parent.parent / "README.md").read_text()
    for command in app.registered_commands:
        name = command.name or command.callback.__name__  # type: ignore[union-attr]
        assert f"k3quant {name}" in readme or name == "demo"


def test_folders_may_be_named_relative_to_the_working_folder(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(nano, tmp_path / "nano")
    shutil.copytree(nano, tmp_path / "own")
    monkeypatch.chdir(tmp_path)
    document("repack", "nano", "--out", "ranks", "--by", "expert-rank:2")
    document("repack", "nano", "--out", "linked", "--by", "original", "--link")
    document("repack", "nano", "--out", "cut", "--layers", "0-3")
    document("convert", "nano", "--out", "nvfp4", "--to", "nvfp4")
    document("manifest", "create", "nano", "--out", "nano.json")
    document("verify", "nano", "--manifest", "nano.json")
    document("repack", "own", "--max-shard-size", "1MB", "--in-place")
    for folder in ("nano", "own", "ranks", "linked", "cut", "nvfp4"):
        assert document("verify", folder)["ok"]
