"""How far a candidate is from a reference on text and media, text and media in rows of their own.

Quantization that hurts vision shows first in the features, then in the rows of media tokens.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from k3quant.eval.executor import walk_layers
from k3quant.eval.layer_meter import LayerDivergence
from k3quant.eval.source import Model
from k3quant.eval.stream_gap import gap_of
from k3quant.eval.windows import Ids
from k3quant.models.residual import Residual
from k3quant.models.rows import rows_per_block
from k3quant.progress import SILENT, Progress

KINDS = ("text", "media")


@dataclass(frozen=True, slots=True, kw_only=True)
class KindDivergence:
    """What a comparison found at the tokens of one kind.

    Attributes:
        tokens: Tokens of that kind.
        router_agreement: Share of chosen experts that both choose; None where the number of
            experts differs or nothing is routed.
        layers: One entry a layer.
    """

    tokens: int
    router_agreement: float | None
    layers: tuple[LayerDivergence, ...]

    def to_json(self) -> dict[str, Any]:
        """Return its part of a report's summary."""
        return {
            "tokens": self.tokens,
            "router_agreement": self.router_agreement,
            "layers": [
                {"layer": entry.layer, "rel_error": entry.rel_error, "cosine": entry.cosine}
                for entry in self.layers
            ],
        }


@dataclass(slots=True)
class Sums:
    """Sums over tokens of each kind, `[kinds, 4]` float64: |r|^2, |c|^2, r c, |c - r|^2."""

    totals: Tensor = field(default_factory=lambda: torch.zeros(len(KINDS), 4, dtype=torch.float64))

    def add(self, reference: Tensor, candidate: Tensor, kinds: Tensor) -> None:
        """Take in `[N, D]` of both sides, and each token's kind, `[N]` int64."""
        step = rows_per_block(4 * reference.shape[-1])
        for r, c, kind in zip(
            *(torch.split(x, step) for x in (reference, candidate, kinds)), strict=True
        ):
            r64, c64 = r.double(), c.double()
            each = torch.stack(
                [(a * b).sum(-1) for a, b in ((r64, r64), (c64, c64), (r64, c64))]
                + [(c64 - r64).square().sum(-1)],
                dim=-1,
            ).cpu()
            self.totals.index_add_(0, kind.cpu(), each)

    def result(self, kind: int, layer: int) -> LayerDivergence:
        """Return relative error and cosine of a kind; None where they mean nothing."""
        gap = gap_of(self.totals[kind].tolist())
        assert gap is not None  # the sums begin with zeros
        return LayerDivergence(layer=layer, rel_error=gap.rel_error, cosine=gap.cosine)


@dataclass(slots=True)
class _Choices:
    """Keeps the experts that the last layer's router chose."""

    last: Tensor | None = None

    def tap(self, name: str, value: Tensor) -> None:
        if name.endswith(".topk_ids"):
            self.last = value

    def take(self) -> Tensor | None:
        last, self.last = self.last, None
        return last


@dataclass(slots=True)
class DataMeter:
    """Walks two models in lockstep over text and media and adds up how far they are apart.

    Attributes:
        candidate: The model that is judged.
        reference: The model it is held against.
    """

    candidate: Model
    reference: Model
    _layers: list[Sums] = field(init=False)
    _tokens: list[int] = field(init=False)
    _same: list[int] = field(init=False)
    _chosen: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._layers = [Sums() for _ in range(self.reference.config.num_hidden_layers)]
        self._tokens, self._same, self._chosen = ([0] * len(KINDS) for _ in range(3))

    def walk(
        self,
        inputs: Sequence[Ids],
        *,
        candidate: Tensor,
        reference: Tensor,
        kinds: Tensor,
        progress: Progress = SILENT,
    ) -> tuple[Residual, Residual]:
        """Run both models through all layers.

        Args:
            inputs: Ids of each window.
            candidate: `[N, D]` stream the candidate begins with.
            reference: `[N, D]` stream the reference begins with.
            kinds: `[N]` int64, each token's place in `KINDS`.
            progress: Is told about each layer.

        Returns:
            The last streams, the candidate's first.
        """
        ours, theirs = _Choices(), _Choices()
        walks = [
            walk_layers(model, inputs, mlp_tap=choices.tap, progress=progress, embedding=stream)
            for model, choices, stream in (
                (self.candidate, ours, candidate),
                (self.reference, theirs, reference),
            )
        ]
        for kind in range(len(KINDS)):
            self._tokens[kind] += int((kinds == kind).sum())
        with closing(walks[0]) as c, closing(walks[1]) as r:
            ours_now, theirs_now = next(c), next(r)
            for sums in self._layers:
                ours_now, theirs_now = next(c), next(r)
                sums.add(theirs_now.prefix, ours_now.prefix, kinds)
                self._count(ours.take(), theirs.take(), kinds)
        return ours_now, theirs_now

    def result(self) -> dict[str, KindDivergence]:
        """Return what all passes found together, by kind."""
        same_experts = (
            self.candidate.config.moe.num_experts == self.reference.config.moe.num_experts
        )
        return {
            name: KindDivergence(
                tokens=self._tokens[kind],
                router_agreement=self._same[kind] / self._chosen[kind]
                if same_experts and self._chosen[kind]
                else None,
                layers=tuple(sums.result(kind, i) for i, sums in enumerate(self._layers)),
            )
            for kind, name in enumerate(KINDS)
        }

    def _count(self, ours: Tensor | None, theirs: Tensor | None, kinds: Tensor) -> None:
        if ours is None or theirs is None:
            return
        step = rows_per_block(ours.shape[-1] * theirs.shape[-1])
        for c, r, kind in zip(*(torch.split(x, step) for x in (ours, theirs, kinds)), strict=True):
            same = (r[:, :, None] == c[:, None, :]).sum((1, 2)).cpu()
            for place in range(len(KINDS)):
                chosen = kind.cpu() == place
                self._same[place] += int(same[chosen].sum())
                self._chosen[place] += int(chosen.sum()) * r.shape[-1]
