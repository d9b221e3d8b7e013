"""The MLP half for several copies of the same tokens, each computed as if it were alone.

A matrix product of more rows may round differently; a candidate that is walked twice side by side
has to give, in its first copy, the very numbers of a walk alone. Experts are still asked for once.

Legend: N tokens of a copy, D hidden, L width of the experts' space, k experts a token.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from k3quant.models.k3_config import K3Config
from k3quant.models.k3_layer import dense_mlp, mlp_input
from k3quant.models.mlp import gated_mlp
from k3quant.models.moe import Experts, after_experts, before_experts
from k3quant.models.residual import Residual
from k3quant.models.router import Routing
from k3quant.models.situ import gate_of
from k3quant.models.tap import Tap

TAPPED = frozenset({"topk_ids", "mlp_out"})


def mlp_of_copies(
    residual: Residual,
    weights: Mapping[str, Tensor],
    experts: Experts,
    config: K3Config,
    layer: int,
    *,
    copies: int,
    tap: Tap | None = None,
) -> Residual:
    """Run the MLP half of a layer.

    Args:
        residual: The stream, `[copies * N, D]`.
        weights: The layer's weights by role, without routed experts.
        experts: Gives the routed experts' weights.
        config: The config.
        layer: 0-based layer.
        copies: Copies of the tokens, one behind the other.
        tap: Receives `topk_ids` and `mlp_out` of all copies.

    Returns:
        The stream after the layer; its first N rows are those of a walk with one copy.
    """
    kept: dict[str, list[Tensor]] = {}

    def keep(name: str, value: Tensor) -> None:
        if name in TAPPED:
            kept.setdefault(name, []).append(value)

    parts = [Residual(*both) for both in zip(*_split(residual, copies), strict=True)]
    inputs = [mlp_input(part, weights, config)[1] for part in parts]
    if config.is_moe(layer):
        chosen = [before_experts(x, weights, config, tap=keep) for x in inputs]
        sums = _routed(chosen, experts, config)
        outputs = [after_experts(x, y, weights, config) for x, y in zip(inputs, sums, strict=True)]
    else:
        outputs = [dense_mlp(x, weights, config) for x in inputs]
    if tap is not None:
        for out in outputs:
            keep("mlp_out", out)
        for name, values in kept.items():
            tap(name, torch.cat(values))
    prefix = torch.cat([part.prefix + m for part, m in zip(parts, outputs, strict=True)])
    return Residual(prefix, residual.blocks)


def _split(
    residual: Residual, copies: int
) -> tuple[Sequence[Tensor], Sequence[tuple[Tensor, ...]]]:
    """Return the prefix of each copy and the blocks of each copy, as views."""
    blocks = [x.chunk(copies) for x in residual.blocks]
    return residual.prefix.chunk(copies), [tuple(x[i] for x in blocks) for i in range(copies)]


def _routed(
    chosen: Sequence[tuple[Routing, Tensor]], experts: Experts, config: K3Config
) -> list[Tensor]:
    """Sum the chosen experts' outputs of each copy, in the order of `moe.routed_experts`."""
    gate, E = gate_of(config), config.moe.num_experts
    counts = [routing.topk_idx.flatten().bincount(minlength=E) for routing, _ in chosen]
    orders = [routing.topk_idx.flatten().argsort(stable=True) for routing, _ in chosen]
    ends = [count.cumsum(0).tolist() for count in counts]
    used = torch.stack(counts).sum(0).nonzero()[:, 0].tolist()
    totals = [torch.zeros_like(z, dtype=torch.float32) for _, z in chosen]
    for expert, own in zip(used, experts(used), strict=True):
        projections = (own["expert.w1"], own["expert.w3"], own["expert.w2"])
        for (routing, z), order, end, total in zip(chosen, orders, ends, totals, strict=True):
            mine = order[end[expert - 1] if expert else 0 : end[expert]]
            if len(mine):
                token = mine // routing.topk_idx.shape[-1]
                share = routing.topk_weight.flatten()[mine, None]
                out = gated_mlp(z[token], *projections, gate=gate)
                total.index_add_(0, token, out.float() * share)
    return [total.to(z.dtype) for total, (_, z) in zip(totals, chosen, strict=True)]
