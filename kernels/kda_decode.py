"""The gated delta rule a token at a time; reference: models.delta_rule.recurrent_delta_rule.

A program keeps all key channels of a few value channels of one head's state in registers.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

_VALUES = 16
_WARPS = 4


def kda_decode(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run the recurrence as it is defined; best for few tokens.

    Args:
        q: `[B, T, H, K]` float32, scaled.
        k: `[B, T, H, K]` float32.
        v: `[B, T, H, V]` float32.
        log_decay: `[B, T, H, K]` float32, at most 0.
        beta: `[B, T, H]` float32.
        state: `[B, H, K, V]` float32, not changed; None is zeros.

    Returns:
        Outputs `[B, T, H, V]` and the state after the last token, `[B, H, K, V]`.

    Source: fla, ops/kda/naive.py (naive_recurrent_kda).
    """
    q, k, v, log_decay, beta = (x.contiguous() for x in (q, k, v, log_decay, beta))
    state = None if state is None else state.contiguous()
    B, T, H, K = k.shape
    V = v.shape[-1]
    out = torch.empty_like(v)
    new_state = torch.empty((B, H, K, V), dtype=torch.float32, device=k.device)
    if new_state.numel():
        _kda_decode_kernel[(triton.cdiv(V, _VALUES), B * H)](
            q,
            k,
            v,
            log_decay,
            beta,
            new_state if state is None else state,
            out,
            new_state,
            T,
            H,
            K,
            V,
            HAS_STATE=state is not None,
            KEYS=triton.next_power_of_2(K),
            VALUES=_VALUES,
            num_warps=_WARPS,
        )
    return out, new_state


@triton.jit
def _kda_decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    log_decay_ptr,
    beta_ptr,
    state_ptr,
    out_ptr,
    new_state_ptr,
    T,
    H,
    K,
    V,
    HAS_STATE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    key = tl.arange(0, KEYS)
    value = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    live_key, live_value = key < K, value < V
    live = live_key[:, None] & live_value[None, :]
    place = head * K * V + key[:, None] * V + value[None, :]
    if HAS_STATE:
        state = tl.load(state_ptr + place, mask=live, other=0)
    else:
        state = tl.zeros((KEYS, VALUES), tl.float32)
    window, h = head // H, head % H
    for t in range(T):
        row = (window * T + t) * H + h
        q = tl.load(q_ptr + row * K + key, mask=live_key, other=0)
        k = tl.load(k_ptr + row * K + key, mask=live_key, other=0)
        decay = tl.exp(tl.load(log_decay_ptr + row * K + key, mask=live_key, other=0))
        v = tl.load(v_ptr + row * V + value, mask=live_value, other=0)
        beta = tl.load(beta_ptr + row)
        state = state * decay[:, None]
        update = beta * (v - tl.sum(state * k[:, None], axis=0))
        state = state + k[:, None] * update[None, :]
        tl.store(out_ptr + row * V + value, tl.sum(state * q[:, None], axis=0), mask=live_value)
    tl.store(new_state_ptr + place, state, mask=live)
