import json
import math

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from k3quant.errors import ExitCode, IncompleteError, UsageError, ValuesError
from k3quant.eval.memory import bytes_per_token, fixed_bytes
from k3quant.eval.perplexity import evaluate
from k3quant.eval.result import EvalResult, perplexity, write_nll
from k3quant.eval.settings import EvalSettings
from k3quant.models.k3_config import read_config

SMALL = EvalSettings(ctx=16)


@pytest.fixture(scope="module")
def nano_golden(data):
    folder = data / "nano"
    return load_file(folder / "golden_ppl.safetensors"), json.loads(
        (folder / "golden_ppl.json").read_text()
    )


@pytest.fixture(scope="module")
def nano_result(nano):
    return evaluate(nano, text=nano / "eval.txt", settings=EvalSettings(ctx=512))


def test_nano_has_the_golden_perplexity(nano_result, nano_golden):
    _, facts = nano_golden
    assert nano_result.tokens_scored == facts["tokens_scored"] == 23918
    assert nano_result.nll_mean == pytest.approx(facts["nll_mean"], abs=2e-4)
    assert nano_result.nll_mean == pytest.approx(3.236385, abs=2e-4)
    assert nano_result.ppl == pytest.approx(facts["ppl"], rel=2e-4)


def test_nano_has_the_golden_likelihood_of_every_token(nano_result, nano_golden):
    np.testing.assert_allclose(nano_result.nll, nano_golden[0]["nll"], rtol=0, atol=2e-3)


def test_ids_give_what_their_text_gives(nano, nano_golden, tmp_path):
    ids = nano_golden[0]["input_ids"][:1200]
    save_file({"input_ids": ids}, tmp_path / "ids.safetensors")
    result = evaluate(nano, tokens=tmp_path / "ids.safetensors")
    assert result.tokens_scored == 1199
    np.testing.assert_allclose(result.nll, nano_golden[0]["nll"][:1199], rtol=0, atol=2e-3)


def test_bfloat16_is_near_float32(nano, nano_golden, tmp_path):
    ids = nano_golden[0]["input_ids"][:1025]
    save_file({"input_ids": ids}, tmp_path / "ids.safetensors")
    result = evaluate(
        nano, tokens=tmp_path / "ids.safetensors", settings=EvalSettings(dtype="bfloat16")
    )
    expected = nano_golden[0]["nll"][:1024].mean()
    # Rounding to 8 bits is noise in a token and cancels in the mean.
    assert result.nll_mean != pytest.approx(expected, abs=1e-6)
    assert result.nll_mean == pytest.approx(expected, abs=2e-2)


def test_summary_holds_what_a_report_needs(nano_result):
    summary = nano_result.to_json()
    assert json.loads(json.dumps(summary)) == summary
    assert {
        "tokens_scored", "nll_mean", "ppl", "context", "stride", "dtype", "seconds", "bytes_read",
        "bos", "tokens_sha256", "tokenizer_sha256",
    } <= summary.keys()  # fmt: skip
    assert (summary["context"], summary["stride"], summary["bos"]) == (512, 512, False)
    # All of the language model was read once, the embedding in part.
    assert 6e6 < summary["bytes_read"] < 7.5e6


def test_mean_is_over_tokens_not_over_windows():
    nll = np.array([math.log(2)] * 3 + [math.log(8)])
    result = EvalResult(
        settings=SMALL, nll=nll, documents=2, windows=2, tokens_sha256="", tokenizer_sha256=None,
        seconds=0.0, bytes_read=0,
    )  # fmt: skip
    assert result.ppl == pytest.approx(2.8284271247)


def test_perplexity_beyond_a_float_is_infinity_and_null_in_json():
    assert perplexity(1e4) == math.inf
    result = EvalResult(
        settings=SMALL, nll=np.array([1e4]), documents=1, windows=1, tokens_sha256="",
        tokenizer_sha256=None, seconds=0.0, bytes_read=0,
    )  # fmt: skip
    assert result.to_json()["ppl"] is None


@pytest.mark.parametrize("documents", [[], [[]], [[5]], [[5], [], [7]]])
def test_nothing_to_score_is_an_error(oracle, write_ids, documents):
    with pytest.raises(IncompleteError, match="nothing to score") as caught:
        evaluate(oracle, tokens=write_ids(*documents), settings=SMALL)
    assert caught.value.exit_code is ExitCode.INCOMPLETE


def test_a_text_shorter_than_a_window_is_scored(oracle, write_ids):
    assert evaluate(oracle, tokens=write_ids([1, 2, 3, 4, 5])).tokens_scored == 4


def test_ids_that_equal_the_pad_id_are_scored(oracle, write_ids):
    assert evaluate(oracle, tokens=write_ids([5, 607, 7, 607], [1, 607])).tokens_scored == 3 + 1


def test_bos_is_read_in_every_window_and_never_scored(oracle, write_ids, some_ids):
    ids = some_ids(40).tolist()
    plain = evaluate(oracle, tokens=write_ids(ids), settings=SMALL)
    with_bos = evaluate(oracle, tokens=write_ids(ids), settings=EvalSettings(ctx=16, bos=True))
    assert plain.tokens_scored == with_bos.tokens_scored == 39
    assert with_bos.to_json()["bos"] is True
    # A window with BOS scores what the same ids score with BOS written before them.
    config = read_config(json.loads((oracle / "config.json").read_text()))
    parts = [[config.bos_token_id, *ids[start : start + 17]] for start in (0, 16, 32)]
    by_hand = evaluate(oracle, tokens=write_ids(*parts), settings=EvalSettings(ctx=64))
    scored = np.split(by_hand.nll, np.cumsum([len(part) - 1 for part in parts])[:-1])
    expected = np.concatenate([nll[1:] for nll in scored])
    np.testing.assert_allclose(with_bos.nll, expected, rtol=0, atol=1e-4)
    assert np.abs(with_bos.nll - plain.nll).max() > 1e-3


def test_a_stride_gives_each_token_at_least_the_rest_of_the_window(oracle, write_ids, some_ids):
    ids = some_ids(40).tolist()
    result = evaluate(oracle, tokens=write_ids(ids), settings=EvalSettings(ctx=16, stride=8))
    assert (result.tokens_scored, result.to_json()["stride"]) == (39, 8)
    # Ids 17 to 24 are scored in the window that starts at 8.
    alone = evaluate(oracle, tokens=write_ids(ids[8:25]), settings=SMALL)
    np.testing.assert_allclose(result.nll[16:24], alone.nll[8:16], rtol=0, atol=1e-4)


def test_passes_under_a_memory_budget_change_nothing(oracle, write_ids, some_ids):
    path = write_ids(some_ids(100).tolist())
    whole = evaluate(oracle, tokens=path, settings=SMALL)
    config = read_config(json.loads((oracle / "config.json").read_text()))
    ahead = 1 << 20
    ram = ahead + fixed_bytes(config) + 40 * bytes_per_token(config)
    split = evaluate(
        oracle, tokens=path, settings=EvalSettings(ctx=16, ram_bytes=ram, ahead_bytes=ahead)
    )
    np.testing.assert_allclose(split.nll, whole.nll, rtol=0, atol=1e-4)
    # Four passes: experts that no token chose are left out, the rest is read again.
    assert split.bytes_read > 2 * whole.bytes_read


def test_a_poisoned_lm_head_gives_no_perplexity(oracle, copy_of, edit_tensor, write_ids):
    folder = copy_of(oracle)

    def poison(weight):
        weight[5, 5] = torch.inf
        return weight

    edit_tensor(folder, "language_model.lm_head.weight", poison)
    with pytest.raises(ValuesError, match=r"lm_head: .*tensor language_model\.lm_head\.weight"):
        evaluate(folder, tokens=write_ids([1, 2, 3]), settings=SMALL)


@pytest.mark.parametrize(
    "facts",
    [{"ctx": 0}, {"stride": 0}, {"ctx": 4, "stride": 5}, {"dtype": "fp8"}, {"device": "tpu"},
     {"read_threads": 0}],
    ids=["no-context", "no-stride", "gaps", "dtype", "device", "no-reader"],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(facts):
    with pytest.raises(UsageError) as caught:
        EvalSettings(**facts)
    assert caught.value.exit_code is ExitCode.USAGE


def test_a_context_beyond_the_model_is_refused(oracle, write_ids):
    path = write_ids([1, 2, 3])
    with pytest.raises(UsageError, match="ctx: expected at most 1048576"):
        evaluate(oracle, tokens=path, settings=EvalSettings(ctx=1048577))
    with pytest.raises(UsageError, match="ctx: expected at most 1048575"):
        evaluate(oracle, tokens=path, settings=EvalSettings(ctx=1048576, bos=True))


@pytest.mark.parametrize("both", [True, False], ids=["both", "neither"])
def test_one_of_text_and_ids_is_needed(oracle, write_ids, both):
    path = write_ids([1, 2]) if both else None
    with pytest.raises(UsageError, match="one of a text and a file of ids"):
        evaluate(oracle, text=path, tokens=path)


def test_likelihoods_are_written_as_measured(oracle, write_ids, tmp_path):
    result = evaluate(oracle, tokens=write_ids([1, 2, 3, 4]), settings=SMALL)
    write_nll(result, tmp_path / "nll.safetensors")
    assert np.array_equal(load_file(tmp_path / "nll.safetensors")["nll"], result.nll)
