"""Gated multi-head latent attention without rotation, in bounded memory at any context.

Keys and values of a few heads at a time are made from the latent, and queries are taken in blocks,
so neither all keys nor all scores exist at once.

Legend: B windows, T tokens, S tokens with those before, D hidden, H heads, G heads at a time.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from k3quant.models.k3_config import MlaConfig
from k3quant.models.norms import LATENT_NORM_EPS, rms_norm
from k3quant.models.tap import Tap

SCORE_ELEMENTS = 1 << 24  # 64 MiB of float32 scores
HEAD_ELEMENTS = 1 << 26  # 256 MiB of float32 queries, keys and values


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaCache:
    """What MLA remembers of the tokens before.

    Attributes:
        kv_latent: `[B, S, kv_lora_rank]`, normed.
        k_rope: `[B, S, rope]`, the part of the keys that all heads share.
    """

    kv_latent: Tensor
    k_rope: Tensor


Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, MlaConfig], Tensor]


def attend_in_blocks(
    queried: Tensor,
    q_weight: Tensor,
    latent: Tensor,
    kv_weight: Tensor,
    k_rope: Tensor,
    mla: MlaConfig,
) -> Tensor:
    """Attend causally, some heads and some queries at a time; the queries are the last T of S.

    Args:
        queried: `[B, T, rank]`, what queries are projected from.
        q_weight: `[H (nope + rope), rank]`.
        latent: `[B, S, kv_lora_rank]`, normed.
        kv_weight: `[H (nope + v), kv_lora_rank]`.
        k_rope: `[B, S, rope]`.
        mla: The config.

    Returns:
        `[B, T, H, v]`.
    """
    B, T, _ = queried.shape
    shape = (B, T, mla.num_heads, mla.v_head_dim)
    out = torch.empty(shape, dtype=queried.dtype, device=queried.device)
    step = _heads_at_a_time(mla, B * latent.shape[1])
    for first in range(0, mla.num_heads, step):
        group = slice(first, min(first + step, mla.num_heads))
        q = _of_heads(queried, q_weight, mla, group)
        kv = _of_heads(latent, kv_weight, mla, group)
        out[:, :, group] = _attend(q, kv, k_rope, mla).transpose(1, 2)
    return out


def mla_attention(
    x: Tensor,
    weights: Mapping[str, Tensor],
    mla: MlaConfig,
    *,
    cache: MlaCache | None = None,
    attend: Attend = attend_in_blocks,
    tap: Tap | None = None,
) -> tuple[Tensor, MlaCache]:
    """Attend causally to everything before.

    Args:
        x: `[B, T, D]`.
        weights: By role, `mla.*`.
        mla: The config.
        cache: What came before; None starts a window.
        attend: The form of the attention itself.
        tap: Receives intermediates.

    Returns:
        `[B, T, D]` and the cache with the new tokens.

    Source: Kimi-K3 modelling code, KimiMLAAttention.
    """
    latent, k_rope = torch.split(
        linear(x, weights["mla.kv_a_proj_with_mqa"]),
        [mla.kv_lora_rank, mla.qk_rope_head_dim],
        dim=-1,
    )
    latent = rms_norm(latent, weights["mla.kv_a_layernorm"], eps=LATENT_NORM_EPS)
    if tap is not None:
        tap("mla_kv_latent_normed", latent)
        tap("mla_k_rope", k_rope)
    if cache is not None:
        latent = torch.cat((cache.kv_latent, latent), dim=1)
        k_rope = torch.cat((cache.k_rope, k_rope), dim=1)
    if mla.q_lora_rank is None:
        queried, q_weight = x, weights["mla.q_proj"]
    else:
        q_latent = linear(x, weights["mla.q_a_proj"])
        queried = rms_norm(q_latent, weights["mla.q_a_layernorm"], eps=LATENT_NORM_EPS)
        q_weight = weights["mla.q_b_proj"]
    gated = attend(queried, q_weight, latent, weights["mla.kv_b_proj"], k_rope, mla).flatten(2)
    if mla.mla_use_output_gate:
        gated = gated * torch.sigmoid(linear(x, weights["mla.g_proj"]))
    if tap is not None:
        tap("mla_o_proj_in", gated)
    return linear(gated, weights["mla.o_proj"]), MlaCache(kv_latent=latent, k_rope=k_rope)


def _heads_at_a_time(mla: MlaConfig, tokens: int) -> int:
    a_head = mla.qk_head_dim + mla.qk_nope_head_dim + mla.v_head_dim
    return max(1, min(mla.num_heads, HEAD_ELEMENTS // max(1, tokens * a_head)))


def _of_heads(x: Tensor, weight: Tensor, mla: MlaConfig, group: slice) -> Tensor:
    """Project `[B, S, rank]` to `[B, G, S, width]` for some heads."""
    B, S, rank = x.shape
    per_head = weight.reshape(mla.num_heads, -1, rank)[group]
    G, width, _ = per_head.shape
    return linear(x, per_head.reshape(-1, rank)).reshape(B, S, G, width).transpose(1, 2)


def _attend(q: Tensor, kv: Tensor, k_rope: Tensor, mla: MlaConfig) -> Tensor:
    """Return softmax(q k^T / sqrt(width)) v, `[B, G, T, v]`; the queries are the last T of S."""
    q_own, q_shared = torch.split(q, [mla.qk_nope_head_dim, mla.qk_rope_head_dim], dim=-1)
    k_own, v = torch.split(kv, [mla.qk_nope_head_dim, mla.v_head_dim], dim=-1)
    B, G, T, _ = q.shape
    S = kv.shape[2]
    k_shared = k_rope[:, None].mT  # [B, 1, rope, S]
    out = torch.empty((B, G, T, mla.v_head_dim), dtype=q.dtype, device=q.device)
    step = max(1, SCORE_ELEMENTS // (B * G * S))
    for first in range(0, T, step):
        last = min(first + step, T)
        seen = S - T + last  # no query of the block sees more
        rows = slice(first, last)
        scores = q_own[:, :, rows] @ k_own[:, :, :seen].mT
        scores = (scores + q_shared[:, :, rows] @ k_shared[..., :seen]).float()
        ahead = torch.ones((last - first, seen), dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(ahead.triu(S - T + first + 1), float("-inf"))
        shares = torch.softmax(scores * mla.qk_head_dim**-0.5, dim=-1).to(q.dtype)
        out[:, :, rows] = shares @ v[:, :, :seen]
    return out
