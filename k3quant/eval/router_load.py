"""Which experts two routers choose: how often they agree, and how evenly they load.

Legend: N tokens, E experts, k experts a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3quant.models.rows import rows_per_block


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLoad:
    """How a layer's tokens spread over its experts.

    Attributes:
        max_over_mean: Tokens of the busiest expert over those of the average one; 1 is even.
        never_chosen: Experts that no token chose.
    """

    max_over_mean: float
    never_chosen: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterComparison:
    """What two routers of a layer did with the same tokens.

    Attributes:
        same: Chosen experts that both choose; 0 where the number of experts differs.
        chosen: Experts that the reference chose.
        agreement: Share of chosen experts that both choose; None where the number of experts
            differs.
        reference: Load of the reference's experts.
        candidate: Load of the candidate's.
    """

    same: int
    chosen: int
    agreement: float | None
    reference: RouterLoad
    candidate: RouterLoad

    def to_json(self) -> dict[str, Any]:
        """Return the part of a layer's entry in a report."""
        sides = (("reference", self.reference), ("candidate", self.candidate))
        loads = {
            name: {"max_over_mean": load.max_over_mean, "never_chosen": load.never_chosen}
            for name, load in sides
        }
        return {"router_agreement": self.agreement, "router_load": loads}


def router_sums(
    reference: Tensor, candidate: Tensor, *, reference_experts: int, candidate_experts: int
) -> Tensor:
    """Count agreement and load.

    Args:
        reference: `[N, k]` experts that the reference chose.
        candidate: `[N, k]` experts that the candidate chose.
        reference_experts: Experts of the reference's layer.
        candidate_experts: Experts of the candidate's.

    Returns:
        `[2 + E + E]` float64: experts chosen by both, experts the reference chose, and the tokens
        of each expert on both sides.
    """
    candidate = candidate.to(reference.device)
    step = rows_per_block(reference.shape[-1] * candidate.shape[-1])
    same = torch.zeros((), dtype=torch.int64, device=reference.device)
    for r, c in zip(torch.split(reference, step), torch.split(candidate, step), strict=True):
        same += (r[:, :, None] == c[:, None, :]).sum()
    loads = (
        experts.flatten().bincount(minlength=count)
        for experts, count in ((reference, reference_experts), (candidate, candidate_experts))
    )
    chosen = torch.full_like(same, reference.numel())
    return torch.cat([torch.stack([same, chosen]), *loads]).double()


def compare_routers(
    sums: Sequence[float], *, reference_experts: int, candidate_experts: int
) -> RouterComparison | None:
    """Return what counts of `router_sums` say; None where nothing was routed."""
    same, chosen = int(sums[0]), int(sums[1])
    if not chosen:
        return None
    comparable = reference_experts == candidate_experts
    return RouterComparison(
        same=same if comparable else 0,
        chosen=chosen,
        agreement=same / chosen if comparable else None,
        reference=_load(sums[2 : 2 + reference_experts]),
        candidate=_load(sums[2 + reference_experts :]),
    )


def _load(counts: Sequence[float]) -> RouterLoad:
    return RouterLoad(
        max_over_mean=max(counts) * len(counts) / sum(counts), never_chosen=list(counts).count(0)
    )
