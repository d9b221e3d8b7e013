"""`k3quant tokens` and `k3quant eval --data`: ids, scores of lines, refusals by exit code."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from k3quant.cli.main import app


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def goldens(data: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads(
        (data / "oracle" / "golden" / "tokenizer.json").read_text()
    )
    return found


def test_tokens_prints_the_ids_of_a_text(oracle: Path) -> None:
    result = run("tokens", "Hello, World!", "--tokenizer", oracle)
    assert result.exit_code == 0
    assert result.stdout == "72 101 108 108 111 44 32 87 111 114 108 100 33\n"


@pytest.mark.parametrize("control", [True, False], ids=["control", "as-text"])
def test_tokens_reads_control_tokens_when_asked(oracle: Path, goldens, control: bool) -> None:
    case = next(case for case in goldens["encode"] if "<|media_pad|>" in case["text"])
    words = ["tokens", case["text"], "--tokenizer", oracle, "--json"]
    result = run(*words, *(["--control"] if control else []))
    summary = json.loads(result.stdout)["summary"]
    assert summary["ids"] == case["ids" if control else "ids_specials_as_text"]
    assert (summary["count"], summary["text"]) == (len(summary["ids"]), case["text"])


def test_tokens_renders_a_conversation(oracle: Path, goldens, tmp_path: Path) -> None:
    golden = goldens["chat"]["tools"]
    document = dict(golden["kwargs"])
    document["messages"] = document.pop("conversation")
    path = tmp_path / "chat.json"
    path.write_text(json.dumps(document))
    result = run("tokens", "--chat", path, "--tokenizer", oracle, "--json")
    summary = json.loads(result.stdout)["summary"]
    assert (summary["ids"], summary["text"]) == (golden["ids"], golden["rendered"])


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        pytest.param([], 2, "expected one of a text and --chat", id="nothing"),
        pytest.param(["x", "--chat", "f"], 2, "expected one of a text and --chat", id="both"),
        pytest.param(["--chat", "f", "--control"], 2, "expected --control with", id="control"),
        pytest.param(["x", "--tokenizer", "nowhere"], 3, "tiktoken.model: expected", id="nowhere"),
    ],
)
def test_tokens_refuses(words: list[str], code: int, said: str) -> None:
    result = run("tokens", *words)
    assert result.exit_code == code
    assert said in result.stderr


@pytest.fixture
def lines(tmp_path: Path, data: Path) -> Path:
    shutil.copy(data / "oracle" / "golden" / "rgb_70x45.png", tmp_path)
    picture = {"type": "image", "image": "rgb_70x45.png"}
    document = {"text": "Seen: <|kimi_image_placeholder|> here", "media": [picture]}
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(document) + "\n")
    return path


def test_eval_scores_lines_of_text_and_media(oracle: Path, lines: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    result = run("eval", oracle, "--data", lines, "--reference", oracle, "--json", "--out", report)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found == json.loads(report.read_text())
    assert found["command"] == "eval"
    assert found["summary"]["lines"][0]["media_tokens"] == 6
    assert found["summary"]["features"]["rel_error"] == 0.0


def test_eval_prints_a_table_of_lines(oracle: Path, lines: Path) -> None:
    alone = run("eval", oracle, "--data", lines).stdout
    assert "line" in alone
    assert "KL" not in alone
    both = run("eval", oracle, "--data", lines, "--reference", oracle).stdout
    for word in ("KL ", "vision ", "text ", "media "):
        assert word in both


@pytest.mark.parametrize("words", [["--text", "x"], ["--stride", "3"], ["--bos"]])
def test_eval_refuses_other_inputs_beside_lines(oracle: Path, lines: Path, words) -> None:
    assert run("eval", oracle, "--data", lines, *words).exit_code == 2
