import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from k3quant.errors import IncompleteError, SchemaError, UsageError
from k3quant.eval.trace import TraceSettings, trace
from k3quant.eval.trace_table import trace_entries
from k3quant.models.k3_config import read_config

# What rounding alone moves between implementations; states and choices are held tighter below.
TOLERANCE = 1e-4
TIGHTER = {"topk_ids": 0, "input_ids": 0, "topk_weights": 1e-5, "log_decay": 5e-5, "beta": 1e-5}
# The golden files hold these of the first token only.
FIRST_TOKEN_ONLY = ("moe_latent_in", "moe_latent_out")


@pytest.fixture(scope="module")
def ids_file(golden, tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "ids.npy"
    np.save(path, golden["s37.input_ids"].numpy())
    return path


@pytest.fixture(scope="module")
def traced(oracle, ids_file):
    out = ids_file.with_name("trace.safetensors")
    written = trace(oracle, ids_file, out)
    assert written.size == out.stat().st_size
    return load_file(out)


def test_trace_holds_every_golden_tensor_and_its_values(golden, traced):
    expected = {
        name.removeprefix("s37."): value
        for name, value in golden.items()
        if name.startswith("s37.") and name != "s37.logits_bf16_run"
    }
    assert expected.keys() <= traced.keys()
    for name, value in expected.items():
        last = name.rpartition(".")[2]
        got = traced[name][0] if last in FIRST_TOKEN_ONLY else traced[name]
        assert got.dtype == value.dtype, name
        tolerance = 5e-4 if last in ("logits", "nll") else TIGHTER.get(last, TOLERANCE)
        torch.testing.assert_close(
            got, value, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_trace_holds_what_its_table_says(oracle, traced):
    config = read_config(json.loads((oracle / "config.json").read_text()))
    table = {name: shape for name, _, shape in trace_entries(config, 37)}
    assert {name: tuple(value.shape) for name, value in traced.items()} == table


def test_all_tokens_have_latents(traced):
    assert traced["layers.1.moe_latent_in"].shape == (37, 96)
    assert (traced["layers.1.moe_latent_in"].abs().amax(dim=1) > 0).all()


def test_layers_that_are_not_asked_for_are_left_out(oracle, ids_file, traced, tmp_path):
    out = tmp_path / "some.safetensors"
    trace(oracle, ids_file, out, settings=TraceSettings(layers=[2, 7]))
    some = load_file(out)
    kept = {
        n for n in traced if not n.startswith("layers.") or n.startswith(("layers.2.", "layers.7."))
    }
    assert some.keys() == kept
    for name, value in some.items():
        assert torch.equal(value, traced[name]), name


def test_one_token_is_enough(oracle, write_ids, tmp_path):
    out = tmp_path / "one.safetensors"
    trace(oracle, write_ids([5]), out)
    one = load_file(out)
    assert one["logits"].shape == (1, 608)
    assert one["nll"].shape == (0,)


def test_logits_come_out_whole_from_any_blocks(oracle, ids_file, traced, tmp_path, monkeypatch):
    monkeypatch.setattr("k3quant.eval.checkpoint_model.HEAD_BLOCK_ELEMENTS", 160 * 50)
    monkeypatch.setattr("k3quant.eval.head.LOGIT_ELEMENTS", 500)
    out = tmp_path / "blocks.safetensors"
    trace(oracle, ids_file, out, settings=TraceSettings(layers=[]))
    torch.testing.assert_close(load_file(out)["logits"], traced["logits"], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("documents", "error", "words"),
    [
        pytest.param([[1, 2], [3]], UsageError, "one list of ids, got 2", id="two-lists"),
        pytest.param([[]], IncompleteError, "at least 1 id", id="no-ids"),
        pytest.param([[1] * 4097], UsageError, "at most 4096", id="too-many"),
        pytest.param([[1, 700]], SchemaError, "position 1", id="foreign-id"),
    ],
)
def test_ids_that_cannot_be_traced_are_refused(
    oracle, write_ids, tmp_path, documents, error, words
):
    out = tmp_path / "out.safetensors"
    with pytest.raises(error, match=words):
        trace(oracle, write_ids(*documents), out)
    assert not out.exists()


def test_a_layer_that_does_not_exist_is_refused(oracle, write_ids, tmp_path):
    with pytest.raises(UsageError, match="expected 0 to 8, got 9"):
        trace(oracle, write_ids([1]), tmp_path / "out", settings=TraceSettings(layers=[9]))


def test_a_failed_run_leaves_no_file(oracle, copy_of, edit_tensor, write_ids, tmp_path):
    folder = copy_of(oracle)

    def poison(weight):
        weight[0] = float("nan")
        return weight

    edit_tensor(folder, "language_model.model.layers.5.input_layernorm.weight", poison)
    out = tmp_path / "out" / "trace.safetensors"
    out.parent.mkdir()
    with pytest.raises(Exception, match="layer 5"):
        trace(folder, write_ids([1, 2, 3]), out)
    assert list(out.parent.iterdir()) == []
