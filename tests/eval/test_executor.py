import numpy as np
import pytest
import torch

from k3quant.checkpoint.folder import LocalFolder
from k3quant.checkpoint.reader import open_checkpoint
from k3quant.errors import ExitCode, IncompleteError, ResourceError, ValuesError
from k3quant.eval import layer_step
from k3quant.eval.checkpoint_model import CheckpointModel
from k3quant.eval.executor import (
    finish,
    run_layers,
    scored_rows,
    walk_layers,
)
from k3quant.eval.head import negative_log_likelihood
from k3quant.eval.layer_step import plan_batches
from k3quant.eval.windows import plan_windows
from k3quant.stream.transfer import Lane

LAYER = "language_model.model.layers"


def _logits(model, inputs, **options):
    hidden = finish(model, run_layers(model, inputs, **options))
    return hidden @ torch.cat([weight for _, weight in model.head_blocks()]).T


def _nll(model, documents, ctx=512):
    windows = list(plan_windows(documents, ctx=ctx, stride=ctx))
    rows, targets = scored_rows(windows)
    residual = run_layers(model, [window.inputs for window in windows])
    return negative_log_likelihood(finish(model, residual, rows=rows), targets, model.head_blocks())


@pytest.fixture(scope="module")
def model(oracle, open_model):
    return open_model(oracle)


@pytest.mark.parametrize("name", ["s37", "s64", "s130"])
def test_stream_gives_the_golden_logits_and_likelihoods(model, golden, name):
    ids = golden[f"{name}.input_ids"].numpy()
    torch.testing.assert_close(_logits(model, [ids]), golden[f"{name}.logits"], rtol=0, atol=5e-4)
    nll = _nll(model, [ids])
    torch.testing.assert_close(nll.float(), golden[f"{name}.nll"], rtol=0, atol=5e-4)


@pytest.mark.parametrize("tokens", [1, 16, 40, 4096], ids=lambda n: f"batches-of-{n}")
def test_windows_together_equal_windows_alone(model, some_ids, monkeypatch, tokens):
    inputs = [some_ids(n, seed=n) for n in (3, 70, 7, 7, 1, 33)]
    alone = torch.cat([_logits(model, [ids]) for ids in inputs])
    monkeypatch.setattr(layer_step, "BATCH_TOKENS", tokens)
    torch.testing.assert_close(_logits(model, inputs), alone, rtol=0, atol=1e-4)


def test_documents_of_unlike_length_are_scored_without_their_filling(model, some_ids):
    short, long = some_ids(3, seed=1), some_ids(7, seed=2)
    both = _nll(model, [short, long])
    apart = _nll(model, [short]), _nll(model, [long])
    assert (len(both), *map(len, apart)) == (2 + 6, 2, 6)
    # Matrix products of another shape round otherwise; a scored filling would be off by 1e-1.
    assert both[:2].sum().item() == pytest.approx(apart[0].sum().item(), rel=5e-6)
    assert both[2:].sum().item() == pytest.approx(apart[1].sum().item(), rel=5e-6)


def test_later_tokens_do_not_change_earlier_ones(model, some_ids):
    ids = some_ids(90)
    whole = _logits(model, [ids])
    torch.testing.assert_close(_logits(model, [ids[:41]]), whole[:41], rtol=0, atol=1e-4)


def test_stream_is_yielded_after_the_embedding_and_each_layer(model, golden):
    ids = golden["s37.input_ids"].numpy()
    streams = list(walk_layers(model, [ids]))
    assert len(streams) == 10
    for layer, residual in enumerate(streams[1:]):
        torch.testing.assert_close(
            residual.prefix, golden[f"s37.layers.{layer}.out"], rtol=0, atol=1e-4
        )
    blocks = torch.stack(streams[-1].blocks, dim=1)
    torch.testing.assert_close(blocks, golden["s37.block_residual"], rtol=0, atol=1e-4)


def test_a_tap_of_several_windows_is_an_error(model, some_ids):
    with pytest.raises(ValueError, match="one window"):
        run_layers(model, [some_ids(3), some_ids(3)], tap=lambda name, value: None)


@pytest.mark.parametrize(
    ("lengths", "tokens", "expected"),
    [
        pytest.param([2, 2, 2], 4, [[[0, 1], [2, 3]], [[4, 5]]], id="like-lengths"),
        pytest.param([1, 3], 6, [[[1, 2, 3], [0, -1, -1]]], id="longest-first"),
        pytest.param([5], 2, [[[0, 1, 2, 3, 4]]], id="longer-than-a-batch"),
    ],
)
def test_batches_hold_places_and_mark_their_filling(lengths, tokens, expected):
    assert [batch.tolist() for batch in plan_batches(lengths, tokens=tokens)] == expected


def _poison(weight):
    weight.view(-1)[3] = float("nan")
    return weight


@pytest.mark.parametrize(
    ("name", "where"),
    [
        pytest.param(f"{LAYER}.1.input_layernorm.weight", "layer 1, after attention", id="norm"),
        pytest.param(f"{LAYER}.3.self_attn.kv_b_proj.weight", "layer 3, after att", id="mla"),
        pytest.param(f"{LAYER}.2.self_attn.A_log", "layer 2, after attention", id="float32"),
        pytest.param(
            f"{LAYER}.4.block_sparse_moe.routed_expert_norm.weight", "layer 4, after its MLP",
            id="latent-norm",
        ),
        pytest.param(f"{LAYER}.0.mlp.down_proj.weight", "layer 0, after its MLP", id="dense"),
        pytest.param("language_model.model.norm.weight", "after the last norm", id="last-norm"),
    ],
)  # fmt: skip
def test_the_first_tensor_that_is_not_finite_is_named(
    oracle, copy_of, edit_tensor, open_model, some_ids, name, where
):
    folder = copy_of(oracle)
    edit_tensor(folder, name, _poison)
    with pytest.raises(ValuesError) as caught:
        _logits(open_model(folder), [some_ids(9)])
    assert caught.value.exit_code is ExitCode.VALUES
    assert caught.value.message.startswith(where)
    assert f"tensor {name} holds 1 such" in caught.value.message


def test_an_embedding_row_that_is_not_finite_is_named(oracle, copy_of, edit_tensor, open_model):
    folder = copy_of(oracle)
    name = "language_model.model.embed_tokens.weight"
    edit_tensor(folder, name, _poison)
    with pytest.raises(ValuesError, match=rf"the embedding: .*tensor {name}"):
        _logits(open_model(folder), [np.array([0, 1])])


class _BadSector(LocalFolder):
    """A folder in which one tensor cannot be read."""

    def __init__(self, root, entry, error):
        super().__init__(root)
        self._entry, self._error = entry, error

    def read_into(self, file, offset, buffer):
        if (file, offset) == (self._entry.file, self._entry.offset):
            raise self._error
        super().read_into(file, offset, buffer)


@pytest.mark.parametrize("error", [ResourceError("bad sector"), IncompleteError("short file")])
def test_an_expert_that_cannot_be_read_ends_the_run(oracle, some_ids, monkeypatch, error):
    # Whatever the fast way does not read is read again in the way that names the fault.
    monkeypatch.setattr(Lane, "transfer", lambda *_: 0)
    name = f"{LAYER}.2.block_sparse_moe.experts.7.w2.weight_packed"
    entry = open_checkpoint(oracle).entry(name)
    model = CheckpointModel(
        open_checkpoint(_BadSector(oracle, entry, error)),
        dtype=torch.float32, ahead_bytes=1 << 20, threads=1,
    )  # fmt: skip
    with pytest.raises(type(error), match=f"^{error.message}, reading tensor {name}$"):
        _logits(model, [some_ids(50)])
