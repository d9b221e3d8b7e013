"""A decoder layer in its two halves, and the end of the stack.

The attention half needs whole windows; the MLP half takes tokens in any arrangement, so that an
expert is decoded once for all of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from k3quant.models.k3_config import K3Config, LayerKind
from k3quant.models.kda import (
    Convolve,
    DeltaRule,
    GatedNorm,
    KdaCache,
    kda_attention,
    short_convolution,
)
from k3quant.models.mla import Attend, MlaCache, attend_in_blocks, mla_attention
from k3quant.models.mlp import gated_mlp
from k3quant.models.moe import Experts, Route, moe_block
from k3quant.models.norms import gated_rms_norm, rms_norm
from k3quant.models.residual import Residual, mix_blocks
from k3quant.models.router import route
from k3quant.models.situ import Gate, gate_of
from k3quant.models.tap import Tap

LayerCache = KdaCache | MlaCache
Mix = Callable[[Residual, Tensor, Tensor, float], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """The parts of a layer that have several forms; by default the references.

    Attributes:
        mix: Of the attention residuals, `residual.mix_blocks`.
        convolve: KDA's short convolution.
        delta_rule: KDA's recurrence; None chooses by the number of tokens.
        gated_norm: KDA's output norm.
        attend: MLA's attention itself.
        choose: The router.
        gate: Of the MLPs; None takes the config's.
    """

    mix: Mix = mix_blocks
    convolve: Convolve = short_convolution
    delta_rule: DeltaRule | None = None
    gated_norm: GatedNorm = gated_rms_norm
    attend: Attend = attend_in_blocks
    choose: Route = route
    gate: Gate | None = None


REFERENCE = Blocks()


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
    blocks: Blocks = REFERENCE,
    tap: Tap | None = None,
) -> tuple[Residual, LayerCache]:
    """Run a layer up to its attention's addition; arguments and results as `decoder_layer`."""
    eps, every = config.rms_norm_eps, config.attn_res_block_size
    h = mixed(residual, weights, "self_attention_res", config, blocks)
    x = rms_norm(h, weights["input_layernorm"], eps=eps)
    new_cache: LayerCache
    if config.layer_kinds[layer] is LayerKind.KDA:
        assert cache is None or isinstance(cache, KdaCache)
        a, new_cache = kda_attention(
            x,
            weights,
            config.kda,
            norm_eps=eps,
            cache=cache,
            convolve=blocks.convolve,
            delta_rule=blocks.delta_rule,
            gated_norm=blocks.gated_norm,
            tap=tap,
        )
    else:
        assert cache is None or isinstance(cache, MlaCache)
        a, new_cache = mla_attention(
            x, weights, config.mla, cache=cache, attend=blocks.attend, tap=tap
        )
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
    h, x = mlp_input(residual, weights, config)
    if config.is_moe(layer):
        m = moe_block(x.flatten(0, -2), weights, experts, config, tap=tap).reshape(x.shape)
    else:
        m = dense_mlp(x, weights, config)
    out = residual.prefix + m
    if tap is not None:
        tap("mlp_res_out", h)
        tap("mlp_in", x)
        tap("mlp_out", m)
        tap("out", out)
    return Residual(out, residual.blocks)


def mlp_input(
    residual: Residual, weights: Mapping[str, Tensor], config: K3Config, blocks: Blocks = REFERENCE
) -> tuple[Tensor, Tensor]:
    """Return the mixed stream and what the layer's MLP reads, `[..., D]` each."""
    h = mixed(residual, weights, "mlp_res", config, blocks)
    return h, rms_norm(h, weights["post_attention_layernorm"], eps=config.rms_norm_eps)


def dense_mlp(
    x: Tensor, weights: Mapping[str, Tensor], config: K3Config, gate: Gate | None = None
) -> Tensor:
    """Run the MLP of a layer without experts, `[..., D]`."""
    projections = (weights[f"mlp.{name}_proj"] for name in ("gate", "up", "down"))
    return gated_mlp(x, *projections, gate=gate or gate_of(config))


def mixed(
    residual: Residual,
    weights: Mapping[str, Tensor],
    name: str,
    config: K3Config,
    blocks: Blocks = REFERENCE,
) -> Tensor:
    """Mix the stream with the weights `NAME_norm` and `NAME_proj`; without blocks it stays."""
    if config.attn_res_block_size is None:
        return residual.prefix
    norm, proj = weights[f"{name}_norm"], weights[f"{name}_proj"]
    return blocks.mix(residual, norm, proj, config.rms_norm_eps)


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
    h = mixed(residual, weights, "output_attn_res", config)
    hidden = rms_norm(h, weights["norm"], eps=config.rms_norm_eps)
    if tap is not None:
        tap("final_res_out", h)
        tap("final_hidden", hidden)
    return hidden
