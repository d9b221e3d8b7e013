"""Hyper-parameters of a Kimi-K3 as llama.cpp's architecture `kimi-k3` reads them.

Nothing is left to a reader's default: a model that the keys cannot express is refused. Torch-free.
"""

from collections.abc import Mapping

from k3quant.errors import RefusedError, SchemaError
from k3quant.models.k3_config import K3Config, LayerKind
from k3quant.models.tokenizer import Tokenizer
from k3quant.schemes.gguf_file import MetaField, ValueType
from k3quant.schemes.gguf_vocab import vocabulary

ARCHITECTURE = "kimi-k3"
SIGMOID_GATE = 2
QUANTIZATION_VERSION = 2

FILE_TYPES: Mapping[str, int] = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32, "MXFP4": 38}
"""`general.file_type` by the type of most weights.

Source: ggml-org/llama.cpp, `include/llama.h`, `llama_ftype`.
"""

U32, F32, I32 = ValueType.U32, ValueType.F32, ValueType.I32


def check_expressible(config: K3Config) -> None:
    """Refuse a model that the architecture's keys and tensors cannot express.

    Raises:
        RefusedError: The reader would run it as another model.

    Source: ggml-org/llama.cpp, `src/models/kimi-k3.cpp`.
    """
    moe, kda = config.moe, config.kda
    needs: tuple[tuple[str, object, object], ...] = (
        ("hidden_act", "situ", config.hidden_act),
        ("use_full_rank_gate", True, kda.use_full_rank_gate),
        ("moe_router_activation_func", "sigmoid", moe.moe_router_activation_func),
        ("moe_layer_freq", 1, config.moe_layer_freq),
        ("num_expert_group", 1, moe.num_expert_group),
        ("linear_attn_config.num_heads", config.mla.num_heads, kda.num_heads),
    )
    for key, expected, got in needs:
        if got != expected:
            raise RefusedError(
                f"{key}: expected {expected}, got {got}",
                hint=f"architecture `{ARCHITECTURE}` has no key for it",
            )
    if config.attn_res_block_size is None:
        raise RefusedError(
            "attn_res_block_size: expected a number of layers, got none",
            hint=f"architecture `{ARCHITECTURE}` always mixes residuals",
        )


def model_fields(config: K3Config, *, name: str, file_type: int) -> list[MetaField]:
    """Return every field but the tokenizer's, in the order of llama.cpp's own converter.

    Args:
        config: The model.
        name: Shown to people.
        file_type: Value of `general.file_type`.

    Raises:
        RefusedError: The architecture cannot express the model.
        SchemaError: The config states no number of positions.
    """
    check_expressible(config)
    if config.max_position_embeddings is None:
        raise SchemaError(
            "max_position_embeddings: expected a number of positions, got none",
            hint="the reader requires a context length",
        )
    assert config.activation_situ_beta is not None  # `situ` without it is no config
    assert config.activation_situ_linear_beta is not None
    assert config.attn_res_block_size is not None
    mla, kda, moe = config.mla, config.kda, config.moe
    # One shared latent k and v a layer; 0 is what marks a recurrent layer.
    kv_heads = [int(kind is LayerKind.MLA) for kind in config.layer_kinds]
    fields = [
        MetaField("general.architecture", ValueType.STRING, ARCHITECTURE),
        MetaField("general.type", ValueType.STRING, "model"),
        MetaField("general.name", ValueType.STRING, name),
        _own("block_count", U32, config.num_hidden_layers),
        _own("context_length", U32, config.max_position_embeddings),
        _own("embedding_length", U32, config.hidden_size),
        _own("feed_forward_length", U32, config.intermediate_size),
        _own("attention.head_count", U32, mla.num_heads),
        MetaField(f"{ARCHITECTURE}.attention.head_count_kv", I32, kv_heads),
        _own("attention.layer_norm_rms_epsilon", F32, config.rms_norm_eps),
        _own("expert_count", U32, moe.num_experts),
        _own("expert_used_count", U32, moe.num_experts_per_token),
        _own("expert_group_used_count", U32, moe.topk_group),
        _own("expert_gating_func", U32, SIGMOID_GATE),
        MetaField("general.file_type", U32, file_type),
        _own("vocab_size", U32, config.vocab_size),
        _own("ssm.conv_kernel", U32, kda.short_conv_kernel_size),
        _own("kda.head_dim", U32, kda.head_dim),
    ]
    if kda.gate_lower_bound is not None:  # its absence means the softplus decay
        fields.append(_own("kda.gate_lower_bound", F32, kda.gate_lower_bound))
    if mla.q_lora_rank is not None:
        fields.append(_own("attention.q_lora_rank", U32, mla.q_lora_rank))
    fields += [
        _own("attention.kv_lora_rank", U32, mla.kv_lora_rank),
        _own("rope.dimension_count", U32, mla.qk_rope_head_dim),
        _own("attention.key_length", U32, mla.kv_lora_rank + mla.qk_rope_head_dim),
        _own("attention.value_length", U32, mla.kv_lora_rank),
        _own("attention.key_length_mla", U32, mla.qk_head_dim),
        _own("attention.value_length_mla", U32, mla.v_head_dim),
        _own("expert_feed_forward_length", U32, moe.moe_intermediate_size),
        _own("expert_shared_count", U32, moe.num_shared_experts),
        _own("leading_dense_block_count", U32, config.first_k_dense_replace),
        _own("expert_weights_scale", F32, moe.routed_scaling_factor),
        _own("expert_weights_norm", ValueType.BOOL, moe.moe_renormalize),
    ]
    if moe.routed_expert_hidden_size is not None:
        fields.append(_own("expert_latent_length", U32, moe.routed_expert_hidden_size))
    fields += [
        _own("activation.situ_beta", F32, config.activation_situ_beta),
        _own("activation.situ_linear_beta", F32, config.activation_situ_linear_beta),
        _own("attn_res.block_size", U32, config.attn_res_block_size),
        MetaField("general.quantization_version", U32, QUANTIZATION_VERSION),
    ]
    return fields


def tokenizer_fields(config: K3Config, tokenizer: Tokenizer) -> list[MetaField]:
    """Return the tokenizer's fields; ids of the config go before the tokenizer's own.

    The config's end of sequence ends a turn, the tokenizer's a document.

    Raises:
        SchemaError: The tokenizer does not fit the embedding.
    """
    ids = {
        "bos": (config.bos_token_id, tokenizer.bos_id),
        "eos": (config.eos_token_id, tokenizer.eos_id),
        "padding": (config.pad_token_id, tokenizer.pad_id),
    }
    return [
        MetaField("tokenizer.ggml.model", ValueType.STRING, "gpt2"),
        MetaField("tokenizer.ggml.pre", ValueType.STRING, "kimi-k2"),
        *vocabulary(tokenizer, vocab_size=config.vocab_size),
        *(
            MetaField(f"tokenizer.ggml.{role}_token_id", U32, own if stated is None else stated)
            for role, (stated, own) in ids.items()
        ),
        # Nothing is ever added to a text by itself.
        MetaField("tokenizer.ggml.add_bos_token", ValueType.BOOL, False),
        MetaField("tokenizer.ggml.add_eos_token", ValueType.BOOL, False),
    ]


def split_fields(number: int, count: int, num_tensors: int) -> list[MetaField]:
    """Return what a part of a split model says of itself.

    Args:
        number: 0-based number of the part.
        count: Parts.
        num_tensors: Tensors of all parts.

    Source: ggml-org/llama.cpp, `tools/gguf-split/gguf-split.cpp`.
    """
    return [
        MetaField("split.no", ValueType.U16, number),
        MetaField("split.count", ValueType.U16, count),
        MetaField("split.tensors.count", I32, num_tensors),
    ]


def _own(key: str, kind: ValueType, value: bool | int | float) -> MetaField:
    return MetaField(f"{ARCHITECTURE}.{key}", kind, value)
