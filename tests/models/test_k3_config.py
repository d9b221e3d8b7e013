import copy
from typing import Any

import pytest

from k3quant.errors import ExitCode, SchemaError
from k3quant.models.k3_config import read_config

# Every key of the released text_config whose default elsewhere is another model's.
REQUIRED = """
    hidden_size intermediate_size vocab_size num_hidden_layers num_attention_heads
    num_key_value_heads hidden_act activation_situ_beta activation_situ_linear_beta
    attn_res_block_size first_k_dense_replace moe_layer_freq rms_norm_eps kv_lora_rank
    qk_nope_head_dim qk_rope_head_dim v_head_dim mla_use_nope mla_use_output_gate
    latent_moe_use_norm routed_expert_hidden_size moe_intermediate_size moe_renormalize
    moe_router_activation_func num_expert_group topk_group num_experts num_experts_per_token
    num_shared_experts routed_scaling_factor tie_word_embeddings linear_attn_config
""".split()
REQUIRED_LINEAR = """
    full_attn_layers kda_layers num_heads head_dim short_conv_kernel_size gate_lower_bound
    use_full_rank_gate
""".split()


def refused(config: dict[str, Any], *words: str) -> None:
    with pytest.raises(SchemaError) as caught:
        read_config(config)
    assert caught.value.exit_code is ExitCode.SCHEMA
    for word in words:
        assert word in caught.value.message


def changed(config: dict[str, Any], section: str, **values: Any) -> dict[str, Any]:
    result = copy.deepcopy(config)
    target = result
    for part in section.split("."):
        target = target[part] if part else target
    target.update(values)
    return result


@pytest.mark.parametrize("key", REQUIRED)
def test_missing_key_is_refused_by_name(k3_config: dict[str, Any], key: str) -> None:
    config = copy.deepcopy(k3_config)
    del config["text_config"][key]
    refused(config, f"text_config.{key}", "no such key")


@pytest.mark.parametrize("key", REQUIRED_LINEAR)
def test_missing_linear_attention_key_is_refused_by_name(
    k3_config: dict[str, Any], key: str
) -> None:
    config = copy.deepcopy(k3_config)
    del config["text_config"]["linear_attn_config"][key]
    refused(config, f"linear_attn_config.{key}")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("mla_use_nope", False),
        ("tie_word_embeddings", True),
        ("topk_method", "greedy"),
        ("use_grouped_topk", False),
        ("num_nextn_predict_layers", 1),
        ("attention_bias", True),
        ("moe_router_activation_func", "relu"),
        ("hidden_size", "7168"),
        ("hidden_size", True),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", 0),
        ("routed_scaling_factor", None),
        ("moe_renormalize", 1),
        ("a_key_nobody_knows", 3),
    ],
)
def test_value_that_is_not_implemented_is_refused_by_name(
    k3_config: dict[str, Any], key: str, value: Any
) -> None:
    refused(changed(k3_config, "text_config", **{key: value}), key)


@pytest.mark.parametrize(
    ("section", "values", "words"),
    [
        pytest.param("text_config", {"num_key_value_heads": 8}, ["96"], id="kv-heads"),
        pytest.param("text_config", {"num_expert_group": 3}, ["divisor"], id="groups"),
        pytest.param("text_config", {"topk_group": 2}, ["at most"], id="topk-group"),
        pytest.param("text_config", {"num_experts_per_token": 897}, ["896"], id="topk"),
        pytest.param("text_config", {"num_hidden_layers": 92}, ["93"], id="layers-beyond"),
        pytest.param("text_config", {"num_hidden_layers": 94}, ["[94]"], id="layers-missing"),
        pytest.param("text_config", {"eos_token_id": 163840}, ["163840"], id="token-id"),
        pytest.param("text_config", {"bos_token_id": 1}, ["bos_token_id", "agree"], id="two-bos"),
        pytest.param("", {"tie_word_embeddings": True}, ["agree"], id="two-ties"),
        pytest.param("vision_config", {"text_hidden_size": 2304}, ["7168"], id="projector"),
        pytest.param("vision_config", {"merge_type": "x"}, ["merge_type"], id="merge"),
        pytest.param(
            "text_config.linear_attn_config", {"gate_lower_bound": 5.0}, ["negative"], id="bound"
        ),
        pytest.param(
            "text_config.linear_attn_config", {"kda_layers": [1, 1]}, ["twice"], id="layer-twice"
        ),
        pytest.param(
            "text_config.linear_attn_config", {"kda_layers": [0]}, ["at least 1"], id="zero-based"
        ),
    ],
)
def test_contradiction_is_refused(
    k3_config: dict[str, Any], section: str, values: dict[str, Any], words: list[str]
) -> None:
    refused(changed(k3_config, section, **values), *words)


def test_other_model_and_missing_section_are_refused() -> None:
    refused({"model_type": "llama"}, "llama")
    refused({}, "None")
    refused({"model_type": "kimi_k3"}, "text_config")


def test_null_lower_bound_is_the_softplus_decay(k3_config: dict[str, Any]) -> None:
    config = changed(k3_config, "text_config.linear_attn_config", gate_lower_bound=None)
    assert read_config(config).kda.gate_lower_bound is None


def test_neutral_unknown_keys_are_let_be(k3_config: dict[str, Any]) -> None:
    read_config(changed(k3_config, "text_config", some_new_key=None, another=False))


def test_packing_is_read_from_either_place(k3_config: dict[str, Any]) -> None:
    assert read_config(k3_config).packed_experts
    moved = copy.deepcopy(k3_config)
    moved["quantization_config"] = moved["text_config"].pop("quantization_config")
    assert read_config(moved).packed_experts
    del moved["quantization_config"]
    assert not read_config(moved).packed_experts
