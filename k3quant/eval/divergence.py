"""How far a candidate is from a reference: both walked in lockstep on the same ids.

KL is KL(reference || candidate) in nats over the full vocabulary. A checkpoint against itself gives
exactly zero everywhere.
"""

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from k3quant.errors import RefusedError
from k3quant.eval.executor import finish, scored_rows, walk_layers
from k3quant.eval.finite import check_finite
from k3quant.eval.head_pair import score_pair
from k3quant.eval.source import Model
from k3quant.eval.windows import Window
from k3quant.models.k3_config import K3Config
from k3quant.models.residual import Residual
from k3quant.models.rows import rows_per_block
from k3quant.progress import SILENT, Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One side of a comparison.

    Attributes:
        label: How people name it.
        config: Its config.
        tokens_sha256: Digest of the ids it is given.
        tokenizer_sha256: Digest of its tokenizer; None where it has none.
    """

    label: str
    config: K3Config
    tokens_sha256: str
    tokenizer_sha256: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDivergence:
    """How far the residual streams are apart after a layer, over all tokens.

    Attributes:
        layer: 0-based layer.
        rel_error: |candidate - reference| / |reference|; 0 where both are zero, None where only
            the reference is.
        cosine: Of the angle between the two; None where one is zero.
    """

    layer: int
    rel_error: float | None
    cosine: float | None


def layer_divergence(
    layer: int, reference: float, candidate: float, product: float, difference: float
) -> LayerDivergence:
    """Return relative error and cosine from sums of |r|^2, |c|^2, r c and |c - r|^2."""
    norms = math.sqrt(reference * candidate)
    rel_error: float | None = None
    if reference > 0:
        rel_error = math.sqrt(difference / reference)
    elif difference == 0:
        rel_error = 0.0
    return LayerDivergence(
        layer=layer, rel_error=rel_error, cosine=product / norms if norms > 0 else None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """What a comparison found.

    Attributes:
        kld_mean: Mean KL of the scored positions, nats.
        kld_p99: Their 99th percentile.
        top1_agreement: Share of scored positions with the same likeliest id.
        router_agreement: Share of chosen experts that both choose; None where the number of
            experts differs or nothing is routed.
        reference_nll_mean: Mean nats of a scored id under the reference.
        layers: One entry a layer.
    """

    kld_mean: float
    kld_p99: float
    top1_agreement: float
    router_agreement: float | None
    reference_nll_mean: float
    layers: tuple[LayerDivergence, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the part of a report's summary that a comparison adds."""
        return {
            "kld_mean": self.kld_mean,
            "kld_p99": self.kld_p99,
            "top1_agreement": self.top1_agreement,
            "router_agreement": self.router_agreement,
            "reference_nll_mean": self.reference_nll_mean,
            "layers": [
                {"layer": entry.layer, "rel_error": entry.rel_error, "cosine": entry.cosine}
                for entry in self.layers
            ],
        }


def check_comparable(candidate: Subject, reference: Subject) -> None:
    """Refuse two sides whose numbers would mean nothing together.

    Raises:
        RefusedError: They differ in vocabulary, tokenizer, ids, layers or width.
    """
    ours, theirs = candidate.config, reference.config
    facts: list[tuple[str, object, object]] = [
        ("vocab_size", theirs.vocab_size, ours.vocab_size),
        ("num_hidden_layers", theirs.num_hidden_layers, ours.num_hidden_layers),
        ("hidden_size", theirs.hidden_size, ours.hidden_size),
    ]
    if candidate.tokenizer_sha256 and reference.tokenizer_sha256:
        facts.append(("tokenizer", reference.tokenizer_sha256, candidate.tokenizer_sha256))
    facts.append(("token ids", reference.tokens_sha256, candidate.tokens_sha256))
    for name, expected, got in facts:
        if expected != got:
            raise RefusedError(
                f"{candidate.label}: expected the reference's {name} {expected}, got {got}",
                hint="compare checkpoints of the same model, with the same tokenizer files",
            )


@dataclass(slots=True)
class _Sums:
    """Sums over all tokens of one layer, float64."""

    reference: float = 0.0
    candidate: float = 0.0
    product: float = 0.0
    difference: float = 0.0

    def add(self, reference: Tensor, candidate: Tensor) -> None:
        sums = torch.zeros(4, dtype=torch.float64, device=reference.device)
        step = rows_per_block(4 * reference.shape[-1])
        for r, c in zip(torch.split(reference, step), torch.split(candidate, step), strict=True):
            r64, c64 = r.double(), c.double()
            products = (r64.square(), c64.square(), r64 * c64, (c64 - r64).square())
            sums += torch.stack([x.sum() for x in products])
        found = sums.tolist()  # waits for the device once
        self.reference += found[0]
        self.candidate += found[1]
        self.product += found[2]
        self.difference += found[3]

    def result(self, layer: int) -> LayerDivergence:
        return layer_divergence(
            layer, self.reference, self.candidate, self.product, self.difference
        )


@dataclass(slots=True)
class _Agreement:
    """Counts of chosen experts."""

    same: int = 0
    chosen: int = 0
    comparable: bool = True

    def add(self, reference: Tensor, candidate: Tensor) -> None:
        step = rows_per_block(reference.shape[-1] * candidate.shape[-1])
        same = torch.zeros((), dtype=torch.int64, device=reference.device)
        for r, c in zip(torch.split(reference, step), torch.split(candidate, step), strict=True):
            same += (r[:, :, None] == c[:, None, :]).sum()
        self.same += int(same)
        self.chosen += reference.numel()

    def result(self) -> float | None:
        return self.same / self.chosen if self.comparable and self.chosen else None


class Choices:
    """Keeps the experts that the last layer's router chose."""

    def __init__(self) -> None:
        self.last: Tensor | None = None

    def tap(self, name: str, value: Tensor) -> None:
        """Take in an intermediate of a layer's MLP half."""
        if name.endswith(".topk_ids"):
            self.last = value

    def take(self) -> Tensor | None:
        """Return `[N, k]` of the last layer, once; None where it routes nothing."""
        last, self.last = self.last, None
        return last


@dataclass(slots=True)
class DivergenceMeter:
    """Walks two models in lockstep and adds up how far they are apart, over any number of passes.

    Attributes:
        candidate: The model that is judged.
        reference: The model it is held against.
    """

    candidate: Model
    reference: Model
    _layers: list[_Sums] = field(default_factory=list)
    _experts: _Agreement = field(default_factory=_Agreement)
    _kld: list[Tensor] = field(default_factory=list)
    _top1: list[Tensor] = field(default_factory=list)
    _reference_nll: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._layers = [_Sums() for _ in range(self.reference.config.num_hidden_layers)]
        self._experts.comparable = (
            self.reference.config.moe.num_experts == self.candidate.config.moe.num_experts
        )

    def measure(self, windows: Sequence[Window], *, progress: Progress = SILENT) -> Tensor:
        """Run one pass and return the candidate's nats of each scored id, `[N]` float64.

        Raises:
            ValuesError: A value is NaN or infinite.
        """
        reference, candidate = self._walk(windows, progress)
        rows, targets = scored_rows(windows)
        pair = score_pair(
            finish(self.reference, reference, rows=rows),
            finish(self.candidate, candidate, rows=rows),
            targets,
            self.reference.head_blocks(),
            self.candidate.head_blocks(),
        )
        check_finite(pair.reference_nll, self.reference, None, "lm_head of the reference")
        check_finite(pair.candidate_nll, self.candidate, None, "lm_head")
        self._kld.append(pair.kld)
        self._top1.append(pair.same_top1)
        self._reference_nll.append(pair.reference_nll)
        return pair.candidate_nll

    def result(self) -> Divergence:
        """Return what all passes found together."""
        kld = torch.cat(self._kld)
        return Divergence(
            kld_mean=float(kld.numpy().mean()),
            kld_p99=percentile(kld, 0.99),
            top1_agreement=float(torch.cat(self._top1).double().mean()),
            router_agreement=self._experts.result(),
            reference_nll_mean=float(torch.cat(self._reference_nll).numpy().mean()),
            layers=tuple(sums.result(layer) for layer, sums in enumerate(self._layers)),
        )

    def _walk(self, windows: Sequence[Window], progress: Progress) -> tuple[Residual, Residual]:
        inputs = [window.inputs for window in windows]
        theirs, ours = Choices(), Choices()
        with (
            closing(
                walk_layers(self.reference, inputs, mlp_tap=theirs.tap, progress=progress)
            ) as r,
            closing(walk_layers(self.candidate, inputs, mlp_tap=ours.tap, progress=progress)) as c,
        ):
            reference, candidate = next(r), next(c)
            for sums in self._layers:
                reference, candidate = next(r), next(c)
                sums.add(reference.prefix, candidate.prefix)
                chosen = theirs.take(), ours.take()
                if chosen[0] is not None and chosen[1] is not None:
                    self._experts.add(chosen[0], chosen[1])
        return reference, candidate


def percentile(values: Tensor, share: float) -> float:
    """Return a percentile, between two values by linear interpolation; any number of values."""
    ordered = values.sort().values
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return float(torch.lerp(ordered[low], ordered[high], place - low))
