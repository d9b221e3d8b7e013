"""The end of the model, streamed over the vocabulary: all logits never exist at once.

Legend: N tokens, D hidden, V vocabulary.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import linear

from k3quant.eval.source import HeadBlock

LOGIT_ELEMENTS = 1 << 22  # 16 MiB of float32 logits at a time: passes over them stay in cache
DEVICE_LOGIT_ELEMENTS = 1 << 27  # 512 MiB: fewer launches


class LogSumExp:
    """log(sum(exp(logits))) of N rows, fed a block of columns at a time."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.peak = torch.full((rows,), float("-inf"), dtype=torch.float64, device=device)
        self.total = torch.zeros((rows,), dtype=torch.float64, device=device)

    def add(self, rows: slice, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Take in `[n, columns]` float32 logits of some rows.

        Returns:
            exp(logits - peak) as float32 `[n, columns]`, and the factor `[n]` by which sums over
            earlier columns shrink now that the peak has risen.
        """
        before = self.peak[rows]
        peak = torch.maximum(before, logits.amax(dim=-1).double())
        shrink = (before - peak).exp()
        powers = (logits - peak.float()[:, None]).exp_()
        # Within a block float32 will do: torch sums in pairs.
        self.total[rows] = self.total[rows] * shrink + powers.sum(dim=-1).double()
        self.peak[rows] = peak
        return powers, shrink

    def value(self) -> Tensor:
        """Return `[N]` float64; NaN where a logit was NaN."""
        return self.peak + self.total.log()


class TargetLogits:
    """The logit of one id a row, picked out of blocks of columns."""

    def __init__(self, targets: Tensor) -> None:
        self._targets = targets
        self.values = torch.full_like(targets, float("nan"), dtype=torch.float64)

    def add(self, rows: slice, logits: Tensor, first: int) -> None:
        """Take in `[n, columns]` logits of some rows, for the ids from `first` on."""
        local = self._targets[rows] - first
        last = logits.shape[-1] - 1
        found = logits.gather(-1, local.clamp(0, last)[:, None])[:, 0].double()
        here = (local >= 0) & (local <= last)
        self.values[rows] = torch.where(here, found, self.values[rows])


def negative_log_likelihood(hidden: Tensor, targets: Tensor, head: Iterable[HeadBlock]) -> Tensor:
    """Compute -log softmax(lm_head hidden)[target] in one walk over the vocabulary.

    Logits are float32 whatever the activations are; sums over the vocabulary are float64.

    Args:
        hidden: `[N, D]`.
        targets: `[N]` int64 ids.
        head: Blocks of lm_head that cover the vocabulary.

    Returns:
        `[N]` float64 on the processor, in nats; NaN where a logit is NaN.
    """
    targets = targets.to(hidden.device)
    sums, chosen = LogSumExp(len(targets), hidden.device), TargetLogits(targets)
    for first, weight in head:
        for rows, logits in logit_blocks(hidden, weight):
            sums.add(rows, logits)
            chosen.add(rows, logits, first)
    return (sums.value() - chosen.values).cpu()


def logit_blocks(hidden: Tensor, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield float32 logits of a block of rows after the other, for one block of lm_head."""
    elements = DEVICE_LOGIT_ELEMENTS if hidden.is_cuda else LOGIT_ELEMENTS
    step = max(1, elements // weight.shape[0])
    for start in range(0, hidden.shape[0], step):
        rows = slice(start, min(start + step, hidden.shape[0]))
        yield rows, linear(hidden[rows].float(), weight.float())
