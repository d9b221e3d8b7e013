"""Kimi delta attention: short convolutions, the gated delta rule, a gated norm.

Legend: B windows, T tokens, D hidden, H heads, K channels a head (keys and values alike), W = H K,
J taps of the convolution.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, pad, softplus

from k3quant.models.delta_rule import chunked_delta_rule, recurrent_delta_rule
from k3quant.models.k3_config import KdaConfig
from k3quant.models.norms import gated_rms_norm, l2_norm
from k3quant.models.tap import Tap

RECURRENT_TOKENS = 8  # up to here single steps are quicker than a chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaCache:
    """What KDA remembers of the tokens before.

    Attributes:
        state: `[B, H, K, V]` float32.
        conv: Last J raw inputs of the q, k and v convolutions, `[B, W, J]` each, oldest first.
    """

    state: Tensor
    conv: Mapping[str, Tensor]


DeltaRule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
Convolve = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
GatedNorm = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def short_convolution(u: Tensor, weight: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """Convolve each channel causally and take SiLU.

    Args:
        u: `[B, T, W]` raw inputs.
        weight: `[W, 1, J]`, the newest tap last.
        before: `[B, W, J]` last raw inputs before `u`; None is zeros.

    Returns:
        `[B, T, W]` in the dtype of `u`, accumulated in float32, and the last J raw inputs.

    Source: fla, ShortConvolution.
    """
    taps = weight.shape[-1]
    raw = pad(u, (0, 0, taps, 0)) if before is None else torch.cat((before.mT, u), dim=1)
    T = u.shape[1]
    total = torch.zeros_like(u, dtype=torch.float32)
    for j in range(taps):
        total.addcmul_(raw[:, j + 1 : j + 1 + T].float(), weight[:, 0, j].float())
    return torch.nn.functional.silu(total).to(u.dtype), raw[:, T:].mT.contiguous()


def kda_attention(
    x: Tensor,
    weights: Mapping[str, Tensor],
    kda: KdaConfig,
    *,
    norm_eps: float,
    cache: KdaCache | None = None,
    convolve: Convolve = short_convolution,
    delta_rule: DeltaRule | None = None,
    gated_norm: GatedNorm = gated_rms_norm,
    tap: Tap | None = None,
) -> tuple[Tensor, KdaCache]:
    """Attend linearly.

    Args:
        x: `[B, T, D]`.
        weights: By role, `kda.*`.
        kda: The config.
        norm_eps: Of the output norm, `rms_norm_eps`.
        cache: What came before; None starts a window.
        convolve: The form of the short convolution.
        delta_rule: The form of the recurrence; None takes chunks, or single steps for few tokens.
        gated_norm: The form of the output norm.
        tap: Receives intermediates.

    Returns:
        `[B, T, D]` and the cache after the last token.

    Source: Kimi-K3 modelling code, KimiDeltaAttention.
    """
    B, T, _ = x.shape
    heads = (B, T, kda.num_heads, kda.head_dim)
    convolved, conv = {}, {}
    for part in ("q", "k", "v"):
        raw = linear(x, weights[f"kda.{part}_proj"])
        before = None if cache is None else cache.conv[part]
        y, conv[part] = convolve(raw, weights[f"kda.{part}_conv1d"], before)
        convolved[part] = y.reshape(heads)
    r = linear(linear(x, weights["kda.f_a_proj"]), weights["kda.f_b_proj"]).reshape(heads)
    log_decay = decay_of(r, weights["kda.A_log"], weights["kda.dt_bias"], kda)
    raw_beta = linear(x, weights["kda.b_proj"])
    beta = torch.sigmoid(raw_beta.float())
    q, k = l2_norm(convolved["q"]), l2_norm(convolved["k"])
    if delta_rule is None:
        delta_rule = recurrent_delta_rule if T <= RECURRENT_TOKENS else chunked_delta_rule
    before_state = None if cache is None else cache.state
    o, state = delta_rule(
        q * kda.head_dim**-0.5, k, convolved["v"].float(), log_decay, beta, before_state
    )
    gated = gated_norm(
        o, weights["kda.o_norm"], _gate(x, weights, kda).reshape(heads), norm_eps
    ).reshape(B, T, -1)
    if tap is not None:
        named = {"g_raw": r, "beta_raw": raw_beta, "q_l2": q, "k_l2": k}
        named |= {"log_decay": log_decay, "beta": beta, "o": o}
        for name, value in (*((f"{p}_conv", y) for p, y in convolved.items()), *named.items()):
            tap(f"kda.{name}", value)
        tap("kda_o_proj_in", gated)
        tap("kda_state_vk", state.mT)
        for part, inputs in conv.items():
            tap(f"conv_state_{part}", inputs)
    return linear(gated, weights["kda.o_proj"]), KdaCache(state=state, conv=conv)


def decay_of(r: Tensor, A_log: Tensor, dt_bias: Tensor, kda: KdaConfig) -> Tensor:
    """Turn the decay projection into the natural logarithm of the decay.

    Args:
        r: `[B, T, H, K]`.
        A_log: At least H entries in any shape; what follows the first H is padding.
        dt_bias: `[W]`.
        kda: The config; with a bound b the decay is at least exp(b), without it softplus decides.

    Returns:
        `[B, T, H, K]` float32, at most 0.

    Source: fla, ops/kda/gate.py.
    """
    H = kda.num_heads
    rate = A_log.float().flatten()[:H].exp()[:, None]
    shifted = r.float() + dt_bias.float().reshape(H, -1)
    if kda.gate_lower_bound is None:
        return -rate * softplus(shifted)
    return kda.gate_lower_bound * torch.sigmoid(rate * shifted)


def _gate(x: Tensor, weights: Mapping[str, Tensor], kda: KdaConfig) -> Tensor:
    if kda.use_full_rank_gate:
        return linear(x, weights["kda.g_proj"])
    return linear(linear(x, weights["kda.g_a_proj"]), weights["kda.g_b_proj"])
