"""The residual stream: a running prefix sum, and the blocks that attention residuals mix with it.

Legend: D hidden, n blocks saved so far. Leading dimensions (`...`) are tokens in any arrangement.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from k3quant.models.rows import in_row_blocks


@dataclass(frozen=True, slots=True)
class Residual:
    """What one layer hands to the next.

    Attributes:
        prefix: `[..., D]` running sum since the last block start; the whole stream without blocks.
        blocks: Prefix sums saved at each block start, `[..., D]` each; the first is the embedding.
    """

    prefix: Tensor
    blocks: tuple[Tensor, ...] = ()


def mix_blocks(residual: Residual, norm: Tensor, proj: Tensor, eps: float) -> Tensor:
    """Average blocks and prefix, weighted by a softmax over their scores.

    The score of a source is the sum of its unweighted rms norm times `norm` times `proj`; what is
    averaged is the source itself, not its norm.

    Args:
        residual: The stream.
        norm: `[D]` weight of the score's norm.
        proj: `[1, D]` projection to a score.
        eps: Of the score's norm.

    Returns:
        `[..., D]`; the prefix itself while no block is saved.

    Source: Kimi-K3 modelling code, attention residuals.
    """
    if not residual.blocks:
        return residual.prefix
    direction = norm.float() * proj.float().reshape(-1)

    def mix(*sources: Tensor) -> Tensor:
        return _mix(sources, direction, eps=eps)

    return in_row_blocks(mix, (*residual.blocks, residual.prefix), width=2 * norm.numel())


def _mix(sources: Sequence[Tensor], direction: Tensor, *, eps: float) -> Tensor:
    scores = []
    for source in sources:
        x = source.float()
        scores.append((x @ direction) * torch.rsqrt(x.square().mean(dim=-1) + eps))
    shares = torch.softmax(torch.stack(scores, dim=-1), dim=-1)
    total = torch.zeros_like(sources[0], dtype=torch.float32)
    for i, source in enumerate(sources):
        total.addcmul_(source.float(), shares[..., i, None])
    return total.to(sources[0].dtype)
