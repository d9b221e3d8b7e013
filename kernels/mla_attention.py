"""MLA's attention with the latent expanded for some heads at a time; reference: models.mla.

torch's fused attention keeps no scores; what grows with the context is only keys and values of
the heads at hand.
"""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import linear, pad, scaled_dot_product_attention

HEAD_BYTES = 2 << 30

# The first also takes values narrower than keys, and is the fastest where it exists.
_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def mla_attend(
    queried: Tensor,
    q_weight: Tensor,
    latent: Tensor,
    kv_weight: Tensor,
    k_rope: Tensor,
    *,
    heads: int,
    nope: int,
    v_dim: int,
    head_bytes: int = HEAD_BYTES,
) -> Tensor:
    """Attend causally; the queries are the last T of S tokens.

    Args:
        queried: `[B, T, rank]`, what queries are projected from.
        q_weight: `[H (nope + rope), rank]`.
        latent: `[B, S, kv_rank]`, normed.
        kv_weight: `[H (nope + v_dim), kv_rank]`.
        k_rope: `[B, S, rope]`, the part of the keys that all heads share.
        heads: H.
        nope: Width of a head's own part of keys and queries.
        v_dim: Width of a head's values.
        head_bytes: Upper bound of queries, keys, values and results of the heads at hand; one
            head is always allowed.

    Returns:
        `[B, T, H, v_dim]` in the dtype of `queried`.

    Source: Kimi-K3 modelling code, KimiMLAAttention.
    """
    B, T, _ = queried.shape
    S, rope = k_rope.shape[1:]
    width = nope + rope
    out = torch.empty((B, T, heads, v_dim), dtype=queried.dtype, device=queried.device)
    per_head = B * (2 * T + 2 * S) * width * queried.element_size()
    step = max(1, min(heads, head_bytes // max(1, per_head)))
    for first in range(0, heads, step):
        group = slice(first, min(first + step, heads))
        q = _of_heads(queried, q_weight, heads, group)
        kv = _of_heads(latent, kv_weight, heads, group)
        k_own, v = torch.split(kv, [nope, v_dim], dim=-1)
        shared = k_rope[:, None].expand(B, k_own.shape[1], S, rope)
        k = torch.cat((k_own, shared), dim=-1)
        if T == S:
            with sdpa_kernel(_BACKENDS, set_priority=True):
                o = scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            # The kernels that know this mask want one width: zeros behind the values stay zeros.
            v = pad(v, (0, width - v_dim))
            o = scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(T, S))
        out[:, :, group] = o[..., :v_dim].transpose(1, 2)
    return out


def _of_heads(x: Tensor, weight: Tensor, heads: int, group: slice) -> Tensor:
    """Project `[B, S, rank]` to `[B, G, S, width]` for some heads."""
    B, S, rank = x.shape
    per_head = weight.reshape(heads, -1, rank)[group]
    G, width, _ = per_head.shape
    return linear(x, per_head.reshape(-1, rank)).reshape(B, S, G, width).transpose(1, 2)
