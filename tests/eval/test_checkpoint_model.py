import json

import pytest
import torch
from safetensors import safe_open

from k3quant.checkpoint.reader import open_checkpoint
from k3quant.errors import IncompleteError, SchemaError, ValuesError
from k3quant.eval.checkpoint_model import CheckpointModel

LAYER_1 = "language_model.model.layers.1"
EMBED = "language_model.model.embed_tokens.weight"


def _tensor(folder, name):
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(shard, "pt") as file:
            if name in file.keys():  # noqa: SIM118  no mapping
                return file.get_tensor(name)
    raise AssertionError(name)


@pytest.mark.parametrize(
    "ids", [[0], [607], [3, 3, 3], [5, 4, 600, 5, 6, 0], list(range(608))],
    ids=["first", "last", "repeated", "scattered", "all"],
)  # fmt: skip
def test_embedding_reads_the_rows_that_are_needed(oracle, open_model, ids):
    model = open_model(oracle)
    rows = model.embed(torch.tensor(ids))
    assert torch.equal(rows, _tensor(oracle, EMBED).float()[ids])
    if len(ids) == 1 or len(set(ids)) == 1:
        assert model.bytes_read == 160 * 2


def test_far_embedding_rows_are_read_apart(oracle, open_model, monkeypatch):
    monkeypatch.setattr("k3quant.eval.checkpoint_model.GATHER_GAP_BYTES", 320)
    model = open_model(oracle)
    rows = model.embed(torch.tensor([1, 2, 4, 100, 600]))
    assert torch.equal(rows, _tensor(oracle, EMBED).float()[[1, 2, 4, 100, 600]])
    # Rows 1 to 4 in one go, with the gap; the other two alone.
    assert model.bytes_read == (4 + 1 + 1) * 320


@pytest.mark.parametrize("elements", [160, 160 * 7, 1 << 24], ids=["row", "seven-rows", "whole"])
def test_head_blocks_cover_the_vocabulary_once(oracle, open_model, monkeypatch, elements):
    monkeypatch.setattr("k3quant.eval.checkpoint_model.HEAD_BLOCK_ELEMENTS", elements)
    blocks = list(open_model(oracle).head_blocks())
    starts = [first for first, _ in blocks]
    assert starts == list(range(0, 608, min(608, elements // 160)))
    whole = torch.cat([weight for _, weight in blocks])
    assert torch.equal(whole, _tensor(oracle, "language_model.lm_head.weight").float())


def test_a_walk_reads_only_chosen_experts(oracle, open_model):
    model = open_model(oracle)
    with model.walk() as walk:
        walk.layer(0)
        assert {"moe.gate", "kda.q_proj", "input_layernorm"} <= walk.layer(1).keys()
        (only,) = walk.experts(1, [15])
        assert {name: tuple(w.shape) for name, w in only.items()} == {
            "expert.w1": (64, 96), "expert.w2": (96, 64), "expert.w3": (64, 96),
        }  # fmt: skip
        assert "mla.o_proj" not in walk.layer(2)


def test_experts_that_nobody_asks_for_are_not_waited_for(oracle, open_model):
    model = open_model(oracle)
    with model.walk() as walk:
        for layer in range(model.config.num_hidden_layers):
            assert "input_layernorm" in walk.layer(layer)


def test_a_walk_refuses_layers_out_of_order(oracle, open_model):
    with open_model(oracle).walk() as walk:
        walk.layer(0)
        with pytest.raises(ValueError, match="expected layer 1 next, got 2"):
            walk.layer(2)


def test_float32_parameters_stay_float32_beside_bfloat16_weights(oracle):
    model = CheckpointModel(
        open_checkpoint(oracle), dtype=torch.bfloat16, ahead_bytes=1 << 20, threads=1
    )
    with model.walk() as walk:
        weights = walk.layer(0)
    exact = {name for name, weight in weights.items() if weight.dtype is torch.float32}
    assert exact == {
        "kda.A_log", "kda.dt_bias", "kda.o_norm", "kda.q_conv1d", "kda.k_conv1d", "kda.v_conv1d",
    }  # fmt: skip


def test_a_missing_tensor_is_refused_before_anything_is_computed(oracle, copy_of, open_model):
    folder = copy_of(oracle)
    name = f"{LAYER_1}.block_sparse_moe.experts.3.w2.weight_scale"
    shard = folder / "model-00002-of-000012.safetensors"
    raw = shard.read_bytes()
    other = name.replace("experts.3.w2", "experts.3.x2")
    shard.write_bytes(raw.replace(name.encode(), other.encode(), 1))
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(name, other))
    with pytest.raises(SchemaError, match=r"experts\.3\.w2\.weight_scale"):
        open_model(folder)


def test_a_wrong_shape_is_refused_by_name(oracle, copy_of, edit_tensor, open_model):
    folder = copy_of(oracle)
    edit_tensor(folder, f"{LAYER_1}.self_attn.b_proj.weight", lambda w: w.T)
    with pytest.raises(
        SchemaError, match=r"b_proj.weight: expected shape \[4, 160\], got \[160, 4\]"
    ):
        open_model(folder)


def test_a_wrong_dtype_is_refused_by_name(oracle, copy_of, edit_tensor, open_model):
    folder = copy_of(oracle)
    edit_tensor(folder, f"{LAYER_1}.self_attn.dt_bias", lambda w: w.bfloat16())
    # The index's total no longer fits either; a checkpoint without one is read as it is.
    index = folder / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["metadata"]["total_size"] -= 2 * 128
    index.write_text(json.dumps(document))
    with pytest.raises(SchemaError, match=r"dt_bias: expected dtype F32, got BF16"):
        open_model(folder)


@pytest.mark.parametrize("shape", [(4,), (1, 1, 4, 1)], ids=["heads", "kimi-linear"])
def test_unpadded_rates_are_read_as_well(oracle, copy_of, edit_tensor, open_model, shape):
    folder = copy_of(oracle)
    edit_tensor(folder, f"{LAYER_1}.self_attn.A_log", lambda w: w[:4].reshape(shape))
    index = folder / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["metadata"]["total_size"] -= 4 * 28
    index.write_text(json.dumps(document))
    with open_model(folder).walk() as walk:
        walk.layer(0)
        assert walk.layer(1)["kda.A_log"].shape == shape


def _all_layers(model):
    with model.walk() as walk:
        for layer in range(model.config.num_hidden_layers):
            walk.layer(layer)
            list(walk.experts(layer, range(16) if model.config.is_moe(layer) else ()))


def test_a_failed_read_names_file_and_tensor(oracle, copy_of, open_model):
    folder = copy_of(oracle)
    model = open_model(folder)
    shard = folder / "model-00003-of-000012.safetensors"
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size // 2)
    with pytest.raises(
        IncompleteError,
        match=r"^model-00003-of-000012.safetensors: .*, reading tensor .*layers\.2\.",
    ):
        _all_layers(model)


def test_a_nan_scale_names_layer_expert_and_tensor(oracle, copy_of, edit_tensor, open_model):
    folder = copy_of(oracle)

    def damage(scale):
        scale[5, 1] = 255
        return scale

    edit_tensor(folder, f"{LAYER_1}.block_sparse_moe.experts.3.w2.weight_scale", damage)
    with pytest.raises(ValuesError, match=r"^layer 1, expert 3: .*experts\.3\.w2.*255"):
        _all_layers(open_model(folder))
