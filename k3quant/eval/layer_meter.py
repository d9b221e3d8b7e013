"""Adds up, layer by layer, how far a candidate and a reference are apart.

All of a layer is reduced where its tensors are; one short vector a layer comes to the processor.

Legend: N tokens, E experts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from k3quant.eval.lockstep import Step
from k3quant.eval.router_load import RouterComparison, compare_routers, router_sums
from k3quant.eval.stream_gap import NUM_SUMS, Gap, gap_of, gap_sums

STREAM, ATTENTION, MLP, TWIN = "stream", "attn_out", "mlp_out", "twin"
FORCED = "forced_"
PLACES = (STREAM, ATTENTION, MLP, FORCED + STREAM, FORCED + ATTENTION, FORCED + MLP, TWIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDivergence:
    """How far the two are apart in one layer, over all tokens.

    Attributes:
        layer: 0-based layer.
        rel_error: |candidate - reference| / |reference| of the residual stream after it; 0 where
            both are zero, None where only the reference is.
        cosine: Of the angle between the two; None where one is zero.
        attention: Gap of what attention adds; None where it was not measured.
        mlp: Gap of what the MLP or the experts add; None where it was not measured.
        forced: Gap of the streams when the candidate's layer reads what the reference's read;
            None without teacher forcing, as the next two.
        forced_attention: That of attention's output.
        forced_mlp: That of the MLP's.
        router: What the routers chose; None in a layer without experts.
    """

    layer: int
    rel_error: float | None
    cosine: float | None
    attention: Gap | None = None
    mlp: Gap | None = None
    forced: Gap | None = None
    forced_attention: Gap | None = None
    forced_mlp: Gap | None = None
    router: RouterComparison | None = None

    @property
    def stream(self) -> Gap:
        """Gap of the residual streams."""
        return Gap(rel_error=self.rel_error, cosine=self.cosine)

    def to_json(self) -> dict[str, Any]:
        """Return the layer's entry in a report; what was not measured is left out."""
        entry: dict[str, Any] = {"layer": self.layer} | self.stream.to_json()
        if self.forced is not None:
            entry |= self.forced.to_json(prefix=FORCED)
        for name, free, forced in (
            ("attention", self.attention, self.forced_attention),
            ("mlp", self.mlp, self.forced_mlp),
        ):
            if free is not None:
                both = {} if forced is None else forced.to_json(prefix=FORCED)
                entry[name] = free.to_json() | both
        return entry | (self.router.to_json() if self.router else {})


@dataclass(slots=True, kw_only=True)
class LayerMeter:
    """Sums of all layers, over any number of passes.

    Attributes:
        num_layers: Layers.
        reference_experts: Experts of a layer of the reference; 0 without.
        candidate_experts: Experts of a layer of the candidate.
        totals: `[layers, sums]` float64; four for each of `PLACES`, then the routers' counts. NaN
            is what was never measured.
    """

    num_layers: int
    reference_experts: int
    candidate_experts: int
    totals: Tensor = field(init=False)

    def __post_init__(self) -> None:
        width = NUM_SUMS * len(PLACES) + 2 + self.reference_experts + self.candidate_experts
        self.totals = torch.zeros(self.num_layers, width, dtype=torch.float64)

    def add(self, step: Step) -> None:
        """Take in one layer of one pass."""
        theirs, ours = step.seen["reference"], step.seen["candidate"]
        N = len(theirs[STREAM])
        found: dict[str, Tensor] = {}
        for name in (STREAM, ATTENTION, MLP):
            if name in theirs and name in ours:
                found[name] = gap_sums(theirs[name], ours[name][:N])
                if len(ours[name]) > N:
                    found[FORCED + name] = gap_sums(theirs[name], ours[name][N:])
        if TWIN in step.seen:
            found[TWIN] = gap_sums(theirs[STREAM], step.seen[TWIN][STREAM])
        self.totals[step.layer] += self._join(found, theirs.get("topk_ids"), ours.get("topk_ids"))

    def layers(self) -> tuple[LayerDivergence, ...]:
        """Return what all passes found together."""
        found = []
        for layer, sums in enumerate(self.totals.tolist()):
            gaps = {name: gap_of(_part(sums, i)) for i, name in enumerate(PLACES)}
            stream = gaps[STREAM]
            assert stream is not None
            found.append(
                LayerDivergence(
                    layer=layer,
                    rel_error=stream.rel_error,
                    cosine=stream.cosine,
                    attention=gaps[ATTENTION],
                    mlp=gaps[MLP],
                    forced=gaps[FORCED + STREAM],
                    forced_attention=gaps[FORCED + ATTENTION],
                    forced_mlp=gaps[FORCED + MLP],
                    router=compare_routers(
                        sums[NUM_SUMS * len(PLACES) :],
                        reference_experts=self.reference_experts,
                        candidate_experts=self.candidate_experts,
                    ),
                )
            )
        return tuple(found)

    def twin_layers(self) -> tuple[Gap, ...]:
        """Return the gaps of the reference and its twin; empty without one."""
        place = PLACES.index(TWIN)
        gaps = [gap_of(_part(sums, place)) for sums in self.totals.tolist()]
        return tuple(gap for gap in gaps if gap is not None)

    def _join(
        self, gaps: Mapping[str, Tensor], reference: Tensor | None, candidate: Tensor | None
    ) -> Tensor:
        """Return a layer's sums in one vector on the processor."""
        device = gaps[STREAM].device
        none = torch.full((NUM_SUMS,), torch.nan, dtype=torch.float64, device=device)
        parts = [gaps.get(name, none) for name in PLACES]
        if reference is not None and candidate is not None:
            parts.append(
                router_sums(
                    reference,
                    candidate[: len(reference)],
                    reference_experts=self.reference_experts,
                    candidate_experts=self.candidate_experts,
                )
            )
        else:
            parts.append(torch.zeros(self.totals.shape[1] - NUM_SUMS * len(PLACES), device=device))
        return torch.cat([part.to(device) for part in parts]).cpu()


def _part(sums: list[float], place: int) -> list[float]:
    return sums[NUM_SUMS * place : NUM_SUMS * (place + 1)]
