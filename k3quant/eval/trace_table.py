"""Every tensor of a trace: names as in the golden files, shapes from the config.

Legend: N tokens, D hidden, H heads, K channels a head, E experts, k experts a token.
"""

from collections.abc import Iterator

from k3quant.models.k3_config import K3Config, LayerKind

TraceEntry = tuple[str, str, tuple[int, ...]]
"""Name, safetensors dtype and shape."""


def trace_entries(config: K3Config, tokens: int) -> Iterator[TraceEntry]:
    """Yield the tensors of a trace of `tokens` tokens, layer by layer, then the end."""
    N, D = tokens, config.hidden_size
    yield "input_ids", "I64", (N,)
    for layer in range(config.num_hidden_layers):
        for name, dtype, shape in _layer_entries(config, layer, N):
            yield f"layers.{layer}.{name}", dtype, shape
    if config.attn_res_block_size is not None:
        blocks = -(-config.num_hidden_layers // config.attn_res_block_size)
        yield "block_residual", "F32", (N, blocks, D)
    yield "final_res_out", "F32", (N, D)
    yield "final_hidden", "F32", (N, D)
    yield "logits", "F32", (N, config.vocab_size)
    yield "nll", "F32", (N - 1,)


def _layer_entries(config: K3Config, layer: int, N: int) -> Iterator[TraceEntry]:
    for name in ("attn_res_out", "attn_in", "attn_out", "mlp_res_out", "mlp_in", "mlp_out", "out"):
        yield name, "F32", (N, config.hidden_size)
    if config.layer_kinds[layer] is LayerKind.KDA:
        yield from _kda_entries(config, N)
    else:
        mla = config.mla
        yield "mla_kv_latent_normed", "F32", (N, mla.kv_lora_rank)
        yield "mla_k_rope", "F32", (N, mla.qk_rope_head_dim)
        yield "mla_o_proj_in", "F32", (N, mla.num_heads * mla.v_head_dim)
    if config.is_moe(layer):
        yield from _moe_entries(config, N)


def _kda_entries(config: K3Config, N: int) -> Iterator[TraceEntry]:
    kda = config.kda
    H, K = kda.num_heads, kda.head_dim
    for name in ("q_conv", "k_conv", "v_conv", "g_raw", "q_l2", "k_l2", "log_decay", "o"):
        yield f"kda.{name}", "F32", (N, H, K)
    for name in ("beta_raw", "beta"):
        yield f"kda.{name}", "F32", (N, H)
    yield "kda_o_proj_in", "F32", (N, kda.width)
    yield "kda_state_vk", "F32", (H, K, K)
    for part in ("q", "k", "v"):
        yield f"conv_state_{part}", "F32", (kda.width, kda.short_conv_kernel_size)


def _moe_entries(config: K3Config, N: int) -> Iterator[TraceEntry]:
    moe = config.moe
    yield "router_logits", "F32", (N, moe.num_experts)
    yield "topk_ids", "I32", (N, moe.num_experts_per_token)
    yield "topk_weights", "F32", (N, moe.num_experts_per_token)
    yield "router_margin", "F32", (N,)
    if moe.routed_expert_hidden_size is not None:
        yield "moe_latent_in", "F32", (N, moe.routed_expert_hidden_size)
        yield "moe_latent_out", "F32", (N, moe.routed_expert_hidden_size)
    if moe.num_shared_experts:
        yield "moe_shared_out", "F32", (N, config.hidden_size)
