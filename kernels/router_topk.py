"""Scores, biased choice, top k and weights from router logits; reference: models.router.route."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

_WARPS = 4


def router_topk(
    logits: Tensor,
    bias: Tensor,
    *,
    k: int,
    sigmoid: bool,
    renormalize: bool,
    scaling: float,
    sum_eps: float,
) -> tuple[Tensor, Tensor]:
    """Choose k experts for each token, in float32.

    Args:
        logits: `[N, E]` float32.
        bias: `[E]` float32 correction of the choice.
        k: Experts a token, at most E.
        sigmoid: Whether scores are sigmoids rather than a softmax.
        renormalize: Whether the weights of a token are divided by their sum.
        scaling: Factor of all weights.
        sum_eps: Added to the sum of weights.

    Returns:
        `[N, k]` int64 experts in ascending order and `[N, k]` float32 weights. Of equal choices
        the lower experts win; NaN counts as largest.

    Source: Kimi-K3 modelling code, KimiMoEGate.
    """
    logits, bias = logits.contiguous(), bias.contiguous()
    N, E = logits.shape
    topk_idx = torch.empty((N, k), dtype=torch.int64, device=logits.device)
    topk_weight = torch.empty((N, k), dtype=torch.float32, device=logits.device)
    if N * k:
        _router_topk_kernel[(N,)](
            logits,
            bias,
            topk_idx,
            topk_weight,
            E,
            scaling,
            sum_eps,
            K=k,
            SIGMOID=sigmoid,
            RENORMALIZE=renormalize,
            EXPERTS=triton.next_power_of_2(E),
            num_warps=_WARPS,
        )
    return topk_idx, topk_weight


@triton.jit
def _router_topk_kernel(
    logits_ptr,
    bias_ptr,
    idx_ptr,
    weight_ptr,
    E,
    scaling,
    sum_eps,
    K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    live = expert < E
    logits = tl.load(logits_ptr + token * E + expert, mask=live, other=float("-inf"))
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        powers = tl.exp(logits - tl.max(logits, axis=0))
        scores = powers / tl.sum(powers, axis=0)
    choice = scores + tl.load(bias_ptr + expert, mask=live, other=0)
    choice = tl.where(choice == choice, choice, float("inf"))
    choice = tl.where(live, choice, float("-inf"))
    chosen = tl.zeros((EXPERTS,), tl.int32)
    for _ in tl.static_range(K):
        left = tl.where(chosen > 0, float("-inf"), choice)
        best = tl.max(left, axis=0)
        candidate = (left == best) & (chosen == 0)
        first = tl.min(tl.where(candidate, expert, EXPERTS), axis=0)
        chosen = tl.where(expert == first, 1, chosen)
    weights = tl.where(chosen > 0, scores, 0.0)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, axis=0) + sum_eps)
    place = token * K + tl.cumsum(chosen, axis=0) - 1
    tl.store(idx_ptr + place, expert.to(tl.int64), mask=chosen > 0)
    tl.store(weight_ptr + place, weights * scaling, mask=chosen > 0)
