import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from k3quant.errors import IncompleteError, RefusedError, SchemaError
from k3quant.eval.hidden_file import compare_hidden, rescore, score_hidden
from k3quant.eval.perplexity import evaluate
from k3quant.eval.settings import EvalSettings

SETTINGS = EvalSettings(ctx=24)
O_PROJ = "language_model.model.layers.3.self_attn.o_proj.weight"


def test_the_head_done_again_gives_the_same_likelihoods(
    oracle, open_model, write_ids, some_ids, tmp_path
):
    out = tmp_path / "hidden.safetensors"
    path = write_ids(some_ids(60).tolist(), some_ids(9).tolist())
    result = evaluate(oracle, tokens=path, settings=SETTINGS, save_hidden=out)
    nll = score_hidden(open_model(oracle), out)
    assert np.array_equal(nll.numpy(), result.nll)
    assert rescore((open_model(oracle), out)) == {
        "tokens_scored": 67, "nll_mean": result.nll_mean
    }  # fmt: skip
    assert (
        load_file(out)["targets"].tolist() == some_ids(60)[1:].tolist() + some_ids(9)[1:].tolist()
    )
    with safe_open(out, "pt") as file:
        facts = file.metadata()
    assert facts["tokens_sha256"] == result.tokens_sha256
    assert (facts["context"], facts["dtype"], len(facts["checkpoint_sha256"])) == (
        "24",
        "float32",
        64,
    )


def test_passes_write_their_rows_one_behind_the_other(
    oracle, open_model, write_ids, some_ids, tmp_path, monkeypatch
):
    one_by_one = lambda windows, config, **_: ([window] for window in windows)  # noqa: E731
    monkeypatch.setattr("k3quant.eval.perplexity.plan_passes", one_by_one)
    out = tmp_path / "hidden.safetensors"
    path = write_ids(some_ids(60).tolist())
    settings = EvalSettings(ctx=24, dtype="bfloat16")
    evaluate(oracle, tokens=path, settings=settings, save_hidden=out)
    assert load_file(out)["hidden"].dtype is torch.bfloat16
    assert load_file(out)["targets"].tolist() == some_ids(60)[1:].tolist()


def test_two_sides_are_compared_as_in_a_walk(
    oracle, copy_of, edit_tensor, open_model, write_ids, some_ids, tmp_path
):
    folder, path = copy_of(oracle), write_ids(some_ids(60).tolist())
    edit_tensor(folder, O_PROJ, lambda weight: 1.25 * weight)
    files = [tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"]
    for place, out in zip((folder, oracle), files, strict=True):
        evaluate(place, tokens=path, settings=SETTINGS, save_hidden=out)
    walked = evaluate(folder, tokens=path, reference=oracle, settings=SETTINGS)
    ours, theirs = open_model(folder), open_model(oracle)
    pair = compare_hidden(ours, theirs, candidate_hidden=files[0], reference_hidden=files[1])
    assert float(pair.kld.mean()) == pytest.approx(walked.divergence.kld_mean, rel=1e-12)
    found = rescore((ours, files[0]), (theirs, files[1]))
    assert found["kld_p99"] == pytest.approx(walked.divergence.kld_p99, rel=1e-12)
    assert found["nll_mean"] == walked.nll_mean


def test_states_of_other_ids_are_refused(oracle, open_model, write_ids, tmp_path):
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for ids, out in zip(([1, 2, 3], [1, 2, 4]), files, strict=True):
        evaluate(oracle, tokens=write_ids(ids), settings=SETTINGS, save_hidden=out)
    model = open_model(oracle)
    with pytest.raises(RefusedError, match="expected the reference's tokens_sha256"):
        compare_hidden(model, model, candidate_hidden=files[0], reference_hidden=files[1])


def test_a_file_that_does_not_fit_is_refused(oracle, open_model, tmp_path):
    model, path = open_model(oracle), tmp_path / "x.safetensors"
    with pytest.raises(IncompleteError, match="expected a safetensors file, got nothing"):
        score_hidden(model, path)
    targets = torch.zeros(2, dtype=torch.int64)
    save_file({"hidden": torch.zeros(2, 7), "targets": targets}, path)
    with pytest.raises(SchemaError, match=r"expected states of width 160, got \[2, 7\]"):
        score_hidden(model, path)
    save_file({"hidden": torch.zeros(2, 160), "targets": targets + 608}, path)
    with pytest.raises(SchemaError, match="expected ids below 608, got 608"):
        score_hidden(model, path)
    save_file({"targets": targets}, path)
    with pytest.raises(SchemaError, match="expected hidden and targets"):
        score_hidden(model, path)
