"""The mixture of experts: routed experts in their latent space, shared experts at full width.

An expert's weights are asked for once, applied to all its tokens and dropped, so a layer's experts
never exist together.

Legend: N tokens, D hidden, L width of the experts' space, E experts, k experts a token.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from k3quant.models.k3_config import K3Config, MoeConfig
from k3quant.models.mlp import gated_mlp
from k3quant.models.norms import rms_norm
from k3quant.models.router import Routing, route
from k3quant.models.situ import Gate, gate_of
from k3quant.models.tap import Tap

Experts = Callable[[Sequence[int]], Iterable[Mapping[str, Tensor]]]
"""Yields the weights of the experts asked for, in that order, by role `expert.w1` to `.w3`."""

Route = Callable[[Tensor, Tensor, Tensor, MoeConfig, Tap | None], Routing]


def moe_block(
    x: Tensor,
    weights: Mapping[str, Tensor],
    experts: Experts,
    config: K3Config,
    *,
    tap: Tap | None = None,
) -> Tensor:
    """Send each token through its experts and the shared ones.

    Args:
        x: `[N, D]`.
        weights: By role, `moe.*`.
        experts: Gives the routed experts' weights.
        config: The config.
        tap: Receives intermediates.

    Returns:
        `[N, D]`.

    Source: Kimi-K3 modelling code, KimiSparseMoeBlock.
    """
    routing, z = before_experts(x, weights, config, tap=tap)
    y = routed_experts(z, routing, experts, gate=gate_of(config))
    return after_experts(x, y, weights, config, tap=tap)


def before_experts(
    x: Tensor,
    weights: Mapping[str, Tensor],
    config: K3Config,
    *,
    choose: Route = route,
    tap: Tap | None = None,
) -> tuple[Routing, Tensor]:
    """Return the routing of tokens `[N, D]`, and what their experts read, `[N, L]`."""
    routing = choose(x, weights["moe.gate"], weights["moe.bias"], config.moe, tap)
    if config.moe.routed_expert_hidden_size is None:
        return routing, x
    z = linear(x, weights["moe.latent_down"])
    if tap is not None:
        tap("moe_latent_in", z)
    return routing, z


def after_experts(
    x: Tensor,
    y: Tensor,
    weights: Mapping[str, Tensor],
    config: K3Config,
    *,
    gate: Gate | None = None,
    tap: Tap | None = None,
) -> Tensor:
    """Return the block's output `[N, D]` from its input and its experts' sum `[N, L]`."""
    out = y
    if config.moe.routed_expert_hidden_size is not None:
        if config.moe.latent_moe_use_norm:
            y = rms_norm(y, weights["moe.latent_norm"], eps=config.rms_norm_eps)
        if tap is not None:
            tap("moe_latent_out", y)
        out = linear(y, weights["moe.latent_up"])
    if not config.moe.num_shared_experts:
        return out
    projections = (weights[f"moe.shared.{name}_proj"] for name in ("gate", "up", "down"))
    shared = gated_mlp(x, *projections, gate=gate or gate_of(config))
    if tap is not None:
        tap("moe_shared_out", shared)
    return out + shared


def routed_experts(z: Tensor, routing: Routing, experts: Experts, *, gate: Gate) -> Tensor:
    """Sum the chosen experts' outputs, weighted, in float32.

    Args:
        z: `[N, L]`.
        routing: Experts and weights of each token.
        experts: Gives the experts' weights; asked only for experts that some token chose.
        gate: SiTU or SiLU.

    Returns:
        `[N, L]` in the dtype of `z`.
    """
    k = routing.topk_idx.shape[-1]
    order = routing.topk_idx.flatten().argsort(stable=True)
    counts = routing.topk_idx.flatten().bincount()
    used = counts.nonzero()[:, 0]
    share = routing.topk_weight.flatten()[order, None]
    token = order // k
    total = torch.zeros_like(z, dtype=torch.float32)
    start = 0
    for count, expert in zip(counts[used].tolist(), experts(used.tolist()), strict=True):
        mine = slice(start, start + count)
        out = gated_mlp(
            z[token[mine]], expert["expert.w1"], expert["expert.w3"], expert["expert.w2"], gate=gate
        )
        total.index_add_(0, token[mine], out.float() * share[mine])
        start += count
    return total.to(z.dtype)


def add_outputs(out: Tensor, place: Tensor, weight: Tensor, total: Tensor, start: int) -> None:
    """Add the outputs of a run of slots sorted by expert to their tokens' sums.

    Args:
        out: `[rows, L]` outputs of the sorted slots from `start` on.
        place: `[N, k]` int64 sorted position of each slot.
        weight: `[N, k]` float32.
        total: `[N, L]` float32; changed in place.
        start: Sorted position of the first row.
    """
    for j in range(place.shape[1]):
        row = place[:, j] - start
        mine = ((row >= 0) & (row < len(out))).nonzero()[:, 0]
        total[mine] += out[row[mine]].float() * weight[mine, j, None]
