"""The router: which experts a token goes to, and with which weights.

The correction bias takes part in the choice and never in the weights.

Legend: N tokens, E experts, k experts a token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from k3quant.models.k3_config import MoeConfig
from k3quant.models.tap import Tap

WEIGHT_SUM_EPS = 1e-20


@dataclass(frozen=True, slots=True)
class Routing:
    """The choice for each token, by ascending expert.

    Attributes:
        topk_idx: `[N, k]` int64.
        topk_weight: `[N, k]` float32.
    """

    topk_idx: Tensor
    topk_weight: Tensor


def route(x: Tensor, gate: Tensor, bias: Tensor, moe: MoeConfig, tap: Tap | None = None) -> Routing:
    """Choose experts for each token, in float32.

    Args:
        x: `[N, D]`.
        gate: `[E, D]`.
        bias: `[E]` float32 correction of the choice.
        moe: The config.
        tap: Receives logits, choice, weights and margin.

    Returns:
        The choice.

    Source: Kimi-K3 modelling code, KimiMoEGate.
    """
    logits = linear(x.float(), gate.float())
    sigmoid = moe.moe_router_activation_func == "sigmoid"
    scores = torch.sigmoid(logits) if sigmoid else torch.softmax(logits, dim=-1)
    choice, group_gap = _keep_best_groups(scores + bias.float(), moe)
    k = moe.num_experts_per_token
    best = torch.topk(choice, min(k + 1, moe.num_experts), dim=-1)
    topk_idx = best.indices[:, :k].sort(dim=-1).values
    topk_weight = scores.gather(-1, topk_idx)
    if moe.moe_renormalize and k > 1:
        topk_weight = topk_weight / (topk_weight.sum(dim=-1, keepdim=True) + WEIGHT_SUM_EPS)
    topk_weight = topk_weight * moe.routed_scaling_factor
    if tap is not None:
        tap("router_logits", logits)
        tap("topk_ids", topk_idx.int())
        tap("topk_weights", topk_weight)
        tap("router_margin", torch.minimum(_gap_after(best.values, k), group_gap))
    return Routing(topk_idx, topk_weight)


def _keep_best_groups(choice: Tensor, moe: MoeConfig) -> tuple[Tensor, Tensor]:
    """Drop the experts of all but the best groups; also return the gap between the groups."""
    unlimited = choice.new_full((choice.shape[0],), float("inf"))
    groups, kept = moe.num_expert_group, moe.topk_group
    if groups == 1:
        return choice, unlimited
    grouped = choice.reshape(len(choice), groups, -1)
    scores = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
    best = scores.topk(min(kept + 1, groups), dim=-1)
    keep = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best.indices[:, :kept], True)
    choice = grouped.masked_fill(~keep[..., None], float("-inf")).flatten(1)
    return choice, _gap_after(best.values, kept)


def _gap_after(best: Tensor, kept: int) -> Tensor:
    """Return how far the first rejected value lies below the last kept; infinity where none is."""
    if best.shape[-1] == kept:
        return best.new_full((best.shape[0],), float("inf"))
    return best[:, kept - 1] - best[:, kept]
