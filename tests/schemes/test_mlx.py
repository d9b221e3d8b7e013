import json
import re

import numpy as np
import pytest

from k3quant.checkpoint.reader import open_checkpoint
from k3quant.errors import RefusedError, SchemaError, ValuesError
from k3quant.models.k3_config import read_config
from k3quant.schemes.mlx import plan_mlx

_L = "language_model.model.layers."


@pytest.fixture(scope="module")
def checkpoint(nano):
    return open_checkpoint(nano)


@pytest.fixture(scope="module")
def exported(nano, checkpoint, export, tmp_path_factory):
    """Export the small checkpoint once: its folder and the proof."""
    out = tmp_path_factory.mktemp("mlx") / "out"
    return out, export(nano, plan_mlx(checkpoint), out)


@pytest.fixture(scope="module")
def found(exported, read_tensors):
    return read_tensors(exported[0])


@pytest.fixture(scope="module")
def source(nano, read_tensors):
    return read_tensors(nano)


def test_small_checkpoint_has_the_261_tensors_of_the_loaded_model(found):
    assert len(found) == 261


_EXPERTS = [("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")]


@pytest.mark.parametrize(("matrix", "name"), _EXPERTS, ids=["w1", "w2", "w3"])
@pytest.mark.parametrize("layer", [1, 8])
def test_experts_are_stacked_byte_for_byte(found, source, matrix, name, layer):
    stem = f"{_L}{layer}.mlp.switch_mlp.{name}"
    words, scales = found[f"{stem}.weight"], found[f"{stem}.scales"]
    assert (words.dtype, scales.dtype) == (np.uint32, np.uint8)
    assert words.shape[-1] * 8 == scales.shape[-1] * 32
    for expert in range(32):
        module = f"{_L}{layer}.block_sparse_moe.experts.{expert}.{matrix}"
        assert np.array_equal(words[expert].view(np.uint8), source[f"{module}.weight_packed"])
        assert np.array_equal(scales[expert], source[f"{module}.weight_scale"])


def test_first_code_of_a_word_is_its_lowest_nibble(found, source):
    word = int(found[f"{_L}1.mlp.switch_mlp.gate_proj.weight"][0, 0, 0])
    first = source[f"{_L}1.block_sparse_moe.experts.0.w1.weight_packed"][0, :4]
    assert word == sum(int(byte) << 8 * place for place, byte in enumerate(first))


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("language_model.model.embed_tokens.weight", "language_model.model.embed_tokens.weight"),
        ("language_model.lm_head.weight", "language_model.lm_head.weight"),
        (f"{_L}0.self_attn.g_proj.weight", f"{_L}0.self_attn.g_proj.weight"),
        (f"{_L}3.self_attn.g_proj.weight", f"{_L}3.self_attn.g_proj.weight"),
        (f"{_L}0.mlp.up_proj.weight", f"{_L}0.mlp.up_proj.weight"),
        (f"{_L}2.mlp_res_proj.weight", f"{_L}2.mlp_res_proj.weight"),
        (f"{_L}5.mlp.gate.weight", f"{_L}5.block_sparse_moe.gate.weight"),
        (
            f"{_L}5.mlp.e_score_correction_bias",
            f"{_L}5.block_sparse_moe.gate.e_score_correction_bias",
        ),
        (
            f"{_L}5.mlp.routed_expert_norm.weight",
            f"{_L}5.block_sparse_moe.routed_expert_norm.weight",
        ),
        (
            f"{_L}5.mlp.shared_experts.down_proj.weight",
            f"{_L}5.block_sparse_moe.shared_experts.down_proj.weight",
        ),
        (f"{_L}1.self_attn.dt_bias", f"{_L}1.self_attn.dt_bias"),
    ],
    ids=lambda name: name.rpartition("layers.")[2],
)
def test_other_tensors_keep_type_shape_and_bits(found, source, name, stored):
    assert found[name].dtype == source[stored].dtype
    assert np.array_equal(found[name], source[stored])


def test_query_key_and_value_are_joined_by_rows(found, source):
    parts = [source[f"{_L}1.self_attn.{p}_proj.weight"] for p in "qkv"]
    assert np.array_equal(found[f"{_L}1.self_attn.qkv_proj.weight"], np.concatenate(parts))
    taps = [source[f"{_L}1.self_attn.{p}_conv1d.weight"] for p in "qkv"]
    joined = found[f"{_L}1.self_attn.qkv_conv.conv.weight"]
    assert joined.shape == (384, 4, 1)
    assert np.array_equal(joined, np.moveaxis(np.concatenate(taps), 2, 1))


def test_kv_projection_is_split_by_heads(found, source):
    by_head = source[f"{_L}7.self_attn.kv_b_proj.weight"].reshape(4, 64, 64)
    k = found[f"{_L}7.self_attn.embed_q.weight"]
    assert k.shape == (4, 64, 32)
    assert np.array_equal(k, by_head[:, :32].transpose(0, 2, 1))
    assert np.array_equal(found[f"{_L}7.self_attn.unembed_out.weight"], by_head[:, 32:])


def test_a_log_is_cut_to_the_heads_and_stays_a_logarithm(found, source, exported):
    assert np.array_equal(found[f"{_L}0.self_attn.A_log"], source[f"{_L}0.self_attn.A_log"][:4])
    assert "A_log" in exported[1]["transforms"]


def test_padding_of_a_log_is_cut_only_where_it_is_zero(writable_nano, rewrite, export, tmp_path):
    def edit(name, dtype, array):
        if name.endswith("layers.0.self_attn.A_log"):
            array = array.copy()
            array[4] = 1e-30
        return dtype, array

    rewrite(writable_nano, edit)
    plan = plan_mlx(open_checkpoint(writable_nano))
    with pytest.raises(ValuesError, match=r"layers\.0\.self_attn\.A_log: expected zeros beyond"):
        export(writable_nano, plan, tmp_path / "out")


def test_proof_calls_every_weight_exact(exported):
    weights = exported[1]["weights"]
    assert len(weights) == 1788 - 18 - 768  # a packed pair is one weight; vision stays behind
    assert all(record["exact"] for record in weights.values())
    assert all(record["source"] == record["target"] for record in weights.values())


def test_config_says_mxfp4_once_and_no_longer_what_it_was(exported, nano):
    config = json.loads((exported[0] / "config.json").read_text())
    source = json.loads((nano / "config.json").read_text())
    section = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    assert config["quantization"] == config["quantization_config"] == section
    assert "vision_config" not in config
    assert "quantization_config" not in config["text_config"]
    del source["text_config"]["quantization_config"]
    assert config["text_config"] == source["text_config"]
    assert list(config) == sorted(config)
    assert read_config(config | {"quantization_config": None}).vision is None


def test_index_lists_every_tensor_and_counts_weights(exported, found, source):
    index = json.loads((exported[0] / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == dict.fromkeys(sorted(found), "model.safetensors")
    assert list(index["weight_map"]) == sorted(found)
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in found.values())
    packed = sum(a.size for n, a in source.items() if n.endswith("weight_packed"))
    scales = sum(a.size for n, a in source.items() if n.endswith("weight_scale"))
    cut = sum(a.size - 4 for n, a in source.items() if n.endswith("A_log"))
    text = sum(a.size for n, a in source.items() if n.startswith("language_model."))
    assert index["metadata"]["total_parameters"] == text + packed - scales - cut


def test_header_is_marked_as_mlx(exported):
    data = (exported[0] / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header["__metadata__"] == {"format": "mlx"}


def test_tokenizer_goes_along_and_words_on_the_source_do_not(writable_nano, export, tmp_path):
    (writable_nano / "hf_quant_config.json").write_text("{}")
    (writable_nano / "README.md").write_text("the source's")
    (writable_nano / "tokenization_kimi.py").write_text("# code")
    export(writable_nano, plan_mlx(open_checkpoint(writable_nano)), tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"tiktoken.model", "tokenizer_config.json", "tokenization_kimi.py"} <= names
    assert "hf_quant_config.json" not in names
    assert (tmp_path / "out" / "README.md").read_text() != "the source's"


def test_files_are_bounded_and_numbered(nano, checkpoint, export, tmp_path, found, read_tensors):
    limit = 2_600_000
    export(nano, plan_mlx(checkpoint, max_file_bytes=limit), tmp_path / "out")
    files = sorted((tmp_path / "out").glob("model*.safetensors"))
    assert [f.name for f in files] == [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    assert all(file.stat().st_size <= limit for file in files)
    again = read_tensors(tmp_path / "out")
    assert set(again) == set(found)
    assert all(np.array_equal(again[name], found[name]) for name in found)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in files}


def test_every_source_tensor_is_used_or_skipped_with_a_reason(checkpoint):
    plan = plan_mlx(checkpoint)
    used = [name for file in plan.files for unit in file.units for name in unit.sources]
    assert len(used) == len(set(used))
    assert set(used) | set(plan.skipped) == set(checkpoint.entries)
    assert set(used).isdisjoint(plan.skipped)
    assert len(plan.skipped) == 18


def test_unknown_tensor_is_refused_unless_allowed(base, rewrite):
    extra = {"extra.weight": ("F32", np.zeros(3, np.float32))}
    rewrite(base, lambda name, dtype, array: (dtype, array), extra)
    checkpoint = open_checkpoint(base)
    with pytest.raises(RefusedError, match=r"got extra\.weight") as caught:
        plan_mlx(checkpoint)
    assert caught.value.exit_code == 9
    assert set(plan_mlx(checkpoint, allow_skip=["extra.weight"]).skipped) == {"extra.weight"}


def test_missing_tensor_is_refused_by_name(writable_nano, rewrite):
    lost = f"{_L}1.block_sparse_moe.routed_expert_norm.weight"
    rewrite(writable_nano, lambda name, dtype, array: None if name == lost else (dtype, array))
    with pytest.raises(SchemaError, match=re.escape(lost)):
        plan_mlx(open_checkpoint(writable_nano))


def test_parts_of_a_fused_matrix_must_have_one_type(writable_nano, rewrite):
    def edit(name, dtype, array):
        if name.endswith("layers.0.self_attn.k_proj.weight"):
            return "F32", array.astype(np.float32)
        return dtype, array

    rewrite(writable_nano, edit)
    with pytest.raises(RefusedError, match=r"qkv_proj\.weight: .* one type, got BF16, F32"):
        plan_mlx(open_checkpoint(writable_nano))


@pytest.mark.parametrize("what", ["flat", "softmax"])
def test_model_that_the_target_would_change_is_refused(writable_nano, what):
    path = writable_nano / "config.json"
    config = json.loads(path.read_text())
    if what == "flat":
        config = config["text_config"] | {"model_type": "kimi_linear"}
    else:
        config["text_config"]["moe_router_activation_func"] = "softmax"
    path.write_text(json.dumps(config))
    key = "model_type" if what == "flat" else "moe_router_activation_func"
    with pytest.raises(RefusedError, match=f"{key}: expected "):
        plan_mlx(open_checkpoint(writable_nano))


def test_experts_that_are_floats_are_stacked_without_a_section(
    writable_nano, rewrite, export, tmp_path, read_tensors
):
    generator = np.random.default_rng(7)
    floats = {
        name.replace("weight_packed", "weight"): (
            "BF16",
            generator.integers(0, 0x4000, (array.shape[0], array.shape[1] * 2), np.uint16),
        )
        for name, array in read_tensors(writable_nano).items()
        if name.endswith("weight_packed")
    }
    drop = ("weight_packed", "weight_scale")
    rewrite(writable_nano, lambda n, d, a: None if n.endswith(drop) else (d, a), floats)
    export(writable_nano, plan_mlx(open_checkpoint(writable_nano)), tmp_path / "out")
    stacked = read_tensors(tmp_path / "out")[f"{_L}4.mlp.switch_mlp.down_proj.weight"]
    for expert in (0, 31):
        name = f"{_L}4.block_sparse_moe.experts.{expert}.w2.weight"
        assert np.array_equal(stacked[expert], floats[name][1])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization" not in config
    assert "quantization_config" not in config


def test_release_has_files_of_at_most_5_gb(released_checkpoint):
    plan = plan_mlx(released_checkpoint)
    norms, kda, mla, dense, moe = 93 * 6, 69 * 10, 24 * 9, 3, 92 * 14
    assert sum(len(file.places) for file in plan.files) == 5 + norms + kda + mla + dense + moe
    assert max(file.file_bytes for file in plan.files) <= 5_000_000_000
    shapes = json.loads(plan.documents["model.safetensors.index.json"])["weight_map"]
    assert f"{_L}92.mlp.switch_mlp.up_proj.scales" in shapes
