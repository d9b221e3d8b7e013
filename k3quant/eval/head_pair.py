"""Two models' ends side by side, streamed over the vocabulary.

Legend: N tokens, D hidden, V vocabulary.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from k3quant.eval.head import LogSumExp, TargetLogits, logit_blocks
from k3quant.eval.source import HeadBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class PairScores:
    """Scores of two models at the same positions.

    Attributes:
        kld: KL(reference || candidate), `[N]` float64 nats, at least 0.
        same_top1: Whether both find the same id likeliest, `[N]` bool.
        confidence: Probability of the reference's likeliest id, `[N]` float64.
        reference_nll: Nats of the target under the reference, `[N]` float64.
        candidate_nll: Nats of the target under the candidate, `[N]` float64.
    """

    kld: Tensor
    same_top1: Tensor
    confidence: Tensor
    reference_nll: Tensor
    candidate_nll: Tensor


class _Top1:
    """The likeliest id of each row, the lowest of equals."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.value = torch.full((rows,), float("-inf"), device=device)
        self.index = torch.zeros((rows,), dtype=torch.int64, device=device)

    def add(self, rows: slice, logits: Tensor, first: int) -> None:
        best = logits.max(dim=-1)
        better = best.values > self.value[rows]
        self.index[rows] = torch.where(better, best.indices + first, self.index[rows])
        self.value[rows] = torch.where(better, best.values, self.value[rows])


def score_pair(
    reference: Tensor,
    candidate: Tensor,
    targets: Tensor,
    reference_head: Iterable[HeadBlock],
    candidate_head: Iterable[HeadBlock],
) -> PairScores:
    """Compare two models' distributions in one walk over the vocabulary.

    With z the reference's logits and w the candidate's, KL = sum p (z - w) - lse(z) + lse(w).

    Args:
        reference: `[N, D]` what the reference's lm_head reads.
        candidate: `[N, D]` what the candidate's reads.
        targets: `[N]` int64 ids.
        reference_head: Blocks of lm_head.
        candidate_head: Blocks of the same rows.

    Returns:
        The scores, on the processor. Rounding that takes a KL below zero is cut; equal logits give
        exactly zero.
    """
    N, device = len(targets), reference.device
    targets = targets.to(device)
    their_sums, our_sums = LogSumExp(N, device), LogSumExp(N, device)
    their_targets, our_targets = TargetLogits(targets), TargetLogits(targets)
    their_top1, our_top1 = _Top1(N, device), _Top1(N, device)
    weighted = torch.zeros(N, dtype=torch.float64, device=device)
    for (first, their_weight), (place, our_weight) in zip(
        reference_head, candidate_head, strict=True
    ):
        if (first, len(their_weight)) != (place, len(our_weight)):
            raise ValueError("heads: expected blocks of the same rows")
        blocks = zip(
            logit_blocks(reference, their_weight), logit_blocks(candidate, our_weight), strict=True
        )
        for (rows, z), (_, w) in blocks:
            powers, shrink = their_sums.add(rows, z)
            our_sums.add(rows, w)
            gap = (powers * (z - w)).sum(dim=-1).double()
            weighted[rows] = weighted[rows] * shrink + gap
            for targeted, top1, logits in (
                (their_targets, their_top1, z),
                (our_targets, our_top1, w),
            ):
                targeted.add(rows, logits, first)
                top1.add(rows, logits, first)
    their_lse, our_lse = their_sums.value(), our_sums.value()
    confidence = (their_top1.value.double() - their_lse).exp().clamp(max=1)
    kld = weighted / their_sums.total - their_lse + our_lse
    return PairScores(
        kld=kld.clamp(min=0).cpu(),
        same_top1=(their_top1.index == our_top1.index).cpu(),
        confidence=confidence.cpu(),
        reference_nll=(their_lse - their_targets.values).cpu(),
        candidate_nll=(our_lse - our_targets.values).cpu(),
    )
