import json
import shutil

import pytest
import torch
from PIL import Image

from k3quant.checkpoint.folder import LocalFolder
from k3quant.checkpoint.reader import open_checkpoint
from k3quant.convert.plan import plan_export
from k3quant.convert.recipe import load_recipe, parse_recipe
from k3quant.convert.run import ConvertSettings, run_convert
from k3quant.errors import (
    ExitCode,
    IncompleteError,
    RefusedError,
    ResourceError,
    SchemaError,
    UsageError,
)
from k3quant.eval.data import evaluate_data
from k3quant.eval.memory import bytes_per_token, fixed_bytes
from k3quant.eval.perplexity import evaluate
from k3quant.eval.settings import EvalSettings
from k3quant.models.chat import IMAGE_PLACEHOLDER as MARK
from k3quant.models.k3_config import read_config
from k3quant.verify.run import VerifySettings, verify

RGB = {"type": "image", "image": "rgb_70x45.png"}
RGBA = {"type": "image", "image": "rgba_50x61.png"}
LINES = (
    {"text": f"one {MARK} and {MARK} two", "media": [RGB, RGBA]},
    {"text": "The attention residual of a block"},
    {"messages": [{"role": "user", "content": [RGB]}], "answer": "a cat", "thinking": False},
)


@pytest.fixture
def write(tmp_path, data):
    """Write lines beside the golden pictures and return their file."""
    for picture in (data / "oracle" / "golden").glob("*.png"):
        shutil.copy(picture, tmp_path)

    def lines(*documents):
        path = tmp_path / "data.jsonl"
        path.write_text("".join(json.dumps(document) + "\n" for document in documents))
        return path

    return lines


def test_lines_are_scored_one_by_one_and_together(oracle, write):
    together = evaluate_data(oracle, write(*LINES))
    assert [line.number for line in together.lines] == [1, 2, 3]
    for number, document in enumerate(LINES):
        alone = evaluate_data(oracle, write(document))
        torch.testing.assert_close(
            together.lines[number].nll, alone.lines[0].nll, rtol=0, atol=1e-4
        )
    summary = together.to_json()
    assert summary["tokens_scored"] == sum(line["tokens_scored"] for line in summary["lines"])
    assert summary["nll_sum"] == pytest.approx(sum(line["nll_sum"] for line in summary["lines"]))
    assert summary["nll_mean"] == pytest.approx(summary["nll_sum"] / summary["tokens_scored"])
    assert [line["media_tokens"] for line in summary["lines"]] == [12, 0, 6]
    assert (summary["media"], summary["media_tokens"]) == (3, 18)


def test_a_line_of_text_scores_as_a_text_does(oracle, write, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(LINES[1]["text"])
    ours = evaluate_data(oracle, write(LINES[1]))
    torch.testing.assert_close(
        ours.lines[0].nll, torch.from_numpy(evaluate(oracle, text=text).nll), rtol=0, atol=1e-5
    )


def test_what_is_seen_changes_what_is_expected(oracle, write, data, tmp_path):
    document = {"text": f"{MARK} two", "media": [{"type": "image", "image": "a.png"}]}
    path = write(document)
    shutil.copy(tmp_path / "rgb_70x45.png", tmp_path / "a.png")
    first = evaluate_data(oracle, path)
    Image.open(tmp_path / "a.png").rotate(180).save(tmp_path / "a.png")
    second = evaluate_data(oracle, path)
    assert first.tokens_sha256 == second.tokens_sha256
    assert (first.lines[0].nll - second.lines[0].nll).abs().max() > 1e-2


def test_a_checkpoint_against_itself_differs_in_nothing(oracle, write):
    summary = evaluate_data(oracle, write(*LINES), reference=oracle).to_json()
    assert summary["kld_mean"] == summary["kld_p99"] == 0.0
    assert summary["top1_agreement"] == 1.0
    assert summary["reference_nll_mean"] == summary["nll_mean"]
    assert summary["features"]["rel_error"] == 0.0
    for kind, tokens in (("text", None), ("media", 18)):
        row = summary[kind]
        assert tokens in {None, row["tokens"]}
        assert row["router_agreement"] == 1.0
        assert [layer["rel_error"] for layer in row["layers"]] == [0.0] * 9
    assert {line["kld_mean"] for line in summary["lines"]} == {0.0}


@pytest.mark.gpu
def test_lines_score_on_the_gpu_as_on_the_processor(oracle, vision_int8, write):
    lines = write(*LINES)
    host = evaluate_data(vision_int8, lines, reference=oracle)
    device = evaluate_data(
        vision_int8, lines, reference=oracle, settings=EvalSettings(device="cuda")
    )
    for ours, theirs in zip(device.lines, host.lines, strict=True):
        torch.testing.assert_close(ours.nll, theirs.nll, rtol=0, atol=1e-3)
    ours, theirs = device.to_json(), host.to_json()
    assert ours["features"]["rel_error"] == pytest.approx(theirs["features"]["rel_error"], rel=0.02)
    for kind in ("text", "media"):
        for layer, expected in zip(ours[kind]["layers"], theirs[kind]["layers"], strict=True):
            assert layer["rel_error"] == pytest.approx(expected["rel_error"], rel=0.05)


VISION_RECIPE = """
name = "vision-int8"
[[rule]]
families = ["vision tower", "projector"]
format = "int8"
"""


def _convert(source, out, recipe):
    checkpoint = open_checkpoint(source)
    plan = plan_export(checkpoint, recipe, allow_skip=())
    return run_convert(checkpoint, out, plan, ConvertSettings(parameters={"rules": repr(recipe)}))


@pytest.fixture
def vision_int8(oracle, tmp_path):
    out = tmp_path / "vision-int8"
    _convert(oracle, out, parse_recipe(VISION_RECIPE, "recipe"))
    return out


def test_tower_and_projector_are_families_of_recipes(oracle, vision_int8):
    stored = {name: entry.dtype for name, entry in open_checkpoint(vision_int8).entries.items()}
    assert stored["vision_tower.encoder.blocks.1.mlp.fc1.weight"] == "I8"
    assert stored["mm_projector.proj.2.weight"] == "I8"
    assert stored["vision_tower.patch_embed.proj.weight"] == "BF16"
    report = verify(LocalFolder(vision_int8), VerifySettings())
    assert report.exit_code == 0, [finding.message for finding in report.findings]


def test_quantization_that_hurts_vision_alone_shows_in_its_own_rows(oracle, vision_int8, write):
    summary = evaluate_data(vision_int8, write(*LINES), reference=oracle).to_json()
    assert 1e-3 < summary["features"]["rel_error"] < 0.1
    media = [layer["rel_error"] for layer in summary["media"]["layers"]]
    text = [layer["rel_error"] for layer in summary["text"]["layers"]]
    assert media[0] > 2 * text[0] > 0
    kld = [line["kld_mean"] for line in summary["lines"]]
    assert kld[1] == 0.0  # the line of text
    assert min(kld[0], kld[2]) > 1e-6


def test_by_default_vision_is_kept(oracle, tmp_path, write):
    _convert(oracle, tmp_path / "out", load_recipe("int4-experts"))
    summary = evaluate_data(tmp_path / "out", write(*LINES), reference=oracle).to_json()
    assert summary["features"]["rel_error"] == 0.0
    assert summary["kld_mean"] > 0


def test_a_budget_splits_lines_into_passes(oracle, write):
    path = write(*LINES)
    whole = evaluate_data(oracle, path)
    k3 = read_config(open_checkpoint(oracle).config)
    longest = max(line.tokens for line in whole.lines)
    ram = fixed_bytes(k3) + longest * bytes_per_token(k3)
    settings = EvalSettings(ram_bytes=ram, ahead_bytes=0)
    split = evaluate_data(oracle, path, settings=settings)
    assert split.bytes_read > 1.5 * whole.bytes_read
    for ours, theirs in zip(split.lines, whole.lines, strict=True):
        torch.testing.assert_close(ours.nll, theirs.nll, rtol=0, atol=1e-4)
    with pytest.raises(ResourceError, match="ram: expected at least"):
        evaluate_data(oracle, path, settings=EvalSettings(ram_bytes=1000, ahead_bytes=0))


def test_nothing_to_score_is_incomplete(oracle, write):
    with pytest.raises(IncompleteError, match="nothing to score") as caught:
        evaluate_data(oracle, write({"text": "a"}, {"text": MARK, "media": [RGB]}))
    assert caught.value.exit_code is ExitCode.INCOMPLETE


@pytest.mark.parametrize("option", [{"ctx": 64}, {"stride": 3}, {"bos": True}])
def test_windows_make_no_sense_with_lines(oracle, write, option):
    with pytest.raises(UsageError, match="expected neither ctx, stride nor bos"):
        evaluate_data(oracle, write(*LINES), settings=EvalSettings(**option))


def _edit_json(path, change):
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def test_a_reference_that_cuts_pictures_otherwise_is_refused(oracle, copy_of, write):
    other = copy_of(oracle)
    _edit_json(
        other / "preprocessor_config.json",
        lambda d: d["media_proc_cfg"].update(image_mean=[0.4, 0.5, 0.5]),
    )
    with pytest.raises(RefusedError, match="picture settings") as caught:
        evaluate_data(oracle, write(*LINES), reference=other)
    assert caught.value.exit_code is ExitCode.REFUSED


def test_a_media_id_that_is_not_the_tokenizers_is_refused(oracle, copy_of, write):
    folder = copy_of(oracle)
    _edit_json(folder / "config.json", lambda d: d.update(media_placeholder_token_id=5))
    with pytest.raises(SchemaError, match=r"expected the tokenizer's <\|media_pad\|> 373"):
        evaluate_data(folder, write(*LINES))


def test_a_chunk_of_more_frames_than_the_tower_has_times_for_is_refused(oracle, copy_of, write):
    folder = copy_of(oracle)
    _edit_json(
        folder / "preprocessor_config.json",
        lambda d: d["media_proc_cfg"].update(
            sample_fps=8.0, temporal_merge_kernel_size=5, in_patch_limit_each_frame=48,
            timestamp_mode="hh:mm:ss.fff",
        ),
    )  # fmt: skip
    with pytest.raises(SchemaError, match=r"at most the 4 frames .* got 5"):
        evaluate_data(folder, write(*LINES))
