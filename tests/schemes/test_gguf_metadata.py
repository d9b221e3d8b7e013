import json
from dataclasses import replace

import pytest

from k3quant.errors import RefusedError, SchemaError
from k3quant.models.k3_config import read_config
from k3quant.models.tokenizer import Tokenizer
from k3quant.schemes.gguf_file import ValueType
from k3quant.schemes.gguf_metadata import model_fields, split_fields, tokenizer_fields

_REAL = {
    "block_count": 93,
    "context_length": 1048576,
    "embedding_length": 7168,
    "feed_forward_length": 33792,
    "attention.head_count": 96,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "expert_count": 896,
    "expert_used_count": 16,
    "expert_group_used_count": 1,
    "expert_gating_func": 2,
    "vocab_size": 163840,
    "ssm.conv_kernel": 4,
    "kda.head_dim": 128,
    "kda.gate_lower_bound": -5.0,
    "attention.q_lora_rank": 1536,
    "attention.kv_lora_rank": 512,
    "rope.dimension_count": 64,
    "attention.key_length": 576,
    "attention.value_length": 512,
    "attention.key_length_mla": 192,
    "attention.value_length_mla": 128,
    "expert_feed_forward_length": 3072,
    "expert_shared_count": 2,
    "leading_dense_block_count": 1,
    "expert_weights_scale": 1.0,
    "expert_weights_norm": True,
    "expert_latent_length": 3584,
    "activation.situ_beta": 4.0,
    "activation.situ_linear_beta": 25.0,
    "attn_res.block_size": 12,
}
_FLOATS = {
    "attention.layer_norm_rms_epsilon",
    "kda.gate_lower_bound",
    "expert_weights_scale",
    "activation.situ_beta",
    "activation.situ_linear_beta",
}


@pytest.fixture
def config(k3_config):
    return read_config(k3_config)


def _values(config):
    return {f.key: f for f in model_fields(config, name="n", file_type=38)}


@pytest.mark.parametrize("key", _REAL)
def test_value_and_type_of_the_release(config, key):
    field = _values(config)[f"kimi-k3.{key}"]
    if key in _FLOATS:
        kind = ValueType.F32
    else:
        kind = ValueType.BOOL if key == "expert_weights_norm" else ValueType.U32
    assert (field.value, field.type) == (_REAL[key], kind)


def test_no_other_key_is_written(config):
    general = {"architecture", "type", "name", "file_type", "quantization_version"}
    expected = {f"kimi-k3.{key}" for key in _REAL} | {f"general.{key}" for key in general}
    assert set(_values(config)) == expected | {"kimi-k3.attention.head_count_kv"}


def test_kv_heads_mark_the_layer_kinds(config):
    field = _values(config)["kimi-k3.attention.head_count_kv"]
    assert field.type is ValueType.I32
    assert (len(field.value), sum(field.value)) == (93, 24)
    assert field.value[:4] == [0, 0, 0, 1]  # the release's first full-attention layer is its 4th


def test_architecture_comes_first(config):
    first = model_fields(config, name="n", file_type=38)[0]
    assert (first.key, first.value) == ("general.architecture", "kimi-k3")


@pytest.mark.parametrize("section", ["kda", "mla"])
def test_optional_key_is_left_out_where_the_config_has_none(config, section):
    if section == "kda":
        changed = replace(config, kda=replace(config.kda, gate_lower_bound=None))
        key = "kimi-k3.kda.gate_lower_bound"
    else:
        changed = replace(config, mla=replace(config.mla, q_lora_rank=None))
        key = "kimi-k3.attention.q_lora_rank"
    assert set(_values(config)) - set(_values(changed)) == {key}


@pytest.mark.parametrize(
    "key",
    [
        "activation_situ_beta",
        "activation_situ_linear_beta",
        "routed_expert_hidden_size",
        "attn_res_block_size",
        "kv_lora_rank",
        "num_shared_experts",
    ],
)
def test_missing_hyper_parameter_is_refused_by_name(k3_config, key):
    text = {k: v for k, v in k3_config["text_config"].items() if k != key}
    with pytest.raises(SchemaError, match=f"text_config.{key}: expected a value, got no such key"):
        read_config(k3_config | {"text_config": text})


def test_missing_context_length_is_refused(config):
    with pytest.raises(SchemaError, match="max_position_embeddings: expected a number"):
        model_fields(replace(config, max_position_embeddings=None), name="n", file_type=38)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        (None, "hidden_act", "silu"),
        (None, "moe_layer_freq", 2),
        (None, "attn_res_block_size", None),
        ("kda", "use_full_rank_gate", False),
        ("kda", "num_heads", 48),
        ("moe", "moe_router_activation_func", "softmax"),
        ("moe", "num_expert_group", 8),
    ],
    ids=lambda value: str(value),
)
def test_what_the_architecture_cannot_say_is_refused(config, section, key, value):
    if section is None:
        changed = replace(config, **{key: value})
    else:
        changed = replace(config, **{section: replace(getattr(config, section), **{key: value})})
    with pytest.raises(RefusedError, match=f"{key}: expected ") as caught:
        model_fields(changed, name="n", file_type=38)
    assert caught.value.exit_code == 9


def test_end_of_turn_of_the_config_wins_over_the_tokenizers_end_of_document(nano):
    config = read_config(json.loads((nano / "config.json").read_text()))
    tokenizer = Tokenizer.load(nano)
    ids = {f.key: f.value for f in tokenizer_fields(config, tokenizer)}
    assert tokenizer.eos_id == 2049
    assert ids["tokenizer.ggml.bos_token_id"] == 2048
    assert ids["tokenizer.ggml.eos_token_id"] == 2050
    assert ids["tokenizer.ggml.padding_token_id"] == 2303
    unset = replace(config, eos_token_id=None)
    ids = {f.key: f.value for f in tokenizer_fields(unset, tokenizer)}
    assert ids["tokenizer.ggml.eos_token_id"] == 2049


def test_split_fields():
    fields = [(f.key, f.type, f.value) for f in split_fields(2, 13, 2573)]
    assert fields == [
        ("split.no", ValueType.U16, 2),
        ("split.count", ValueType.U16, 13),
        ("split.tensors.count", ValueType.I32, 2573),
    ]
