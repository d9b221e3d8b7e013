"""A decoder layer in its two halves, and the end of the stack.

The attention half needs whole windows; the MLP half takes tokens in any arrangement, so that an
expert is decoded once for all of them.
"""

from collections.abc import Mapping

from torch import Tensor

from k3quant.models.k3_config import K3Config, LayerKind
from k3quant.models.kda import KdaCache, kda_attention
from k3quant.models.mla import MlaCache, mla_attention
from k3quant.models.mlp import gated_mlp
from k3quant.models.moe import Experts, moe_block
from k3quant.models.norms import rms_norm
from k3quant.models.residual import Residual, mix_named
from k3quant.models.situ import gate_of
from k3quant.models.tap import Tap

LayerCache = KdaCache | MlaCache


def decoder_layer(
    residual: Residual,
    weights: Mapping[str, Tensor],
    experts: Experts,
    config: K3Config,
    layer: int,
    *,
    cache: LayerCache | None = None,
    tap: Tap | None = None,
) -> tuple[Residual, LayerCache]:
    """Run one layer.

    Args:
        residual: The stream, `[B, T, D]`.
        weights: The layer's weights by role, without routed experts.
        experts: Gives the routed experts' weights.
        config: The config.
        layer: 0-based layer.
        cache: What the layer remembers of the tokens before; None starts a window.
        tap: Receives intermediates.

    Returns:
        The stream after the layer, and the cache.
    """
    residual, cache = attention_half(residual, weights, config, layer, cache=cache, tap=tap)
    return mlp_half(residual, weights, experts, config, layer, tap=tap), cache


def attention_half(
    residual: Residual,
    weights: Mapping[str, Tensor],
    config: K3Config,
    layer: int,
    *,
    cache: LayerCache | None = None,
    tap: Tap | None = None,
) -> tuple[Residual, LayerCache]:
    """Run a layer up to its attention's addition; arguments and results as `decoder_layer`."""
    eps, every = config.rms_norm_eps, config.attn_res_block_size
    h = (
        residual.prefix
        if every is None
        else mix_named(residual, weights, "self_attention_res", eps=eps)
    )
    x = rms_norm(h, weights["input_layernorm"], eps=eps)
    new_cache: LayerCache
    if config.layer_kinds[layer] is LayerKind.KDA:
        assert cache is None or isinstance(cache, KdaCache)
        a, new_cache = kda_attention(x, weights, config.kda, norm_eps=eps, cache=cache, tap=tap)
    else:
        assert cache is None or isinstance(cache, MlaCache)
        a, new_cache = mla_attention(x, weights, config.mla, cache=cache, tap=tap)
    if tap is not None:
        tap("attn_res_out", h)
        tap("attn_in", x)
        tap("attn_out", a)
    if every is not None and layer % every == 0:
        return Residual(a, (*residual.blocks, residual.prefix)), new_cache
    return Residual(residual.prefix + a, residual.blocks), new_cache


def mlp_half(
    residual: Residual,
    weights: Mapping[str, Tensor],
    experts: Experts,
    config: K3Config,
    layer: int,
    *,
    tap: Tap | None = None,
) -> Residual:
    """Run the rest of a layer, `[..., D]`; arguments as `decoder_layer`."""
    eps = config.rms_norm_eps
    h = residual.prefix
    if config.attn_res_block_size is not None:
        h = mix_named(residual, weights, "mlp_res", eps=eps)
    x = rms_norm(h, weights["post_attention_layernorm"], eps=eps)
    if config.is_moe(layer):
        m = moe_block(x.flatten(0, -2), weights, experts, config, tap=tap).reshape(x.shape)
    else:
        projections = (weights[f"mlp.{name}_proj"] for name in ("gate", "up", "down"))
        m = gated_mlp(x, *projections, gate=gate_of(config))
    out = residual.prefix + m
    if tap is not None:
        tap("mlp_res_out", h)
        tap("mlp_in", x)
        tap("mlp_out", m)
        tap("out", out)
    return Residual(out, residual.blocks)


def final_hidden(
    residual: Residual, weights: Mapping[str, Tensor], config: K3Config, *, tap: Tap | None = None
) -> Tensor:
    """Return what lm_head reads, `[..., D]`.

    Args:
        residual: The stream after the last layer.
        weights: Global weights by role: `norm`, `output_attn_res_norm`, `output_attn_res_proj`.
        config: The config.
        tap: Receives intermediates.
    """
    eps, h = config.rms_norm_eps, residual.prefix
    if config.attn_res_block_size is not None:
        h = mix_named(residual, weights, "output_attn_res", eps=eps)
    hidden = rms_norm(h, weights["norm"], eps=eps)
    if tap is not None:
        tap("final_res_out", h)
        tap("final_hidden", hidden)
    return hidden
