"""How far a candidate is from a reference: both walked in lockstep on the same ids.

KL is KL(reference || candidate) in nats over the full vocabulary. A checkpoint against itself gives
exactly zero everywhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from k3quant.errors import RefusedError
from k3quant.eval.kl_summary import KlSummary, percentile, summarize_kl
from k3quant.eval.layer_meter import LayerDivergence, LayerMeter
from k3quant.eval.noise_floor import NoiseFloor
from k3quant.models.k3_config import K3Config


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
class Divergence:
    """What a comparison found.

    Attributes:
        reference: The reference's name.
        reference_bytes: Bytes of its tensors.
        kl: KL of the scored positions.
        top1_agreement: Share of scored positions with the same likeliest id.
        router_agreement: Share of chosen experts that both choose; None where the number of
            experts differs or nothing is routed.
        reference_nll_mean: Mean nats of a scored id under the reference.
        layers: One entry a layer.
        noise_floor: How far the reference is from itself; None where it was not asked for.
    """

    reference: str
    reference_bytes: int
    kl: KlSummary
    top1_agreement: float
    router_agreement: float | None
    reference_nll_mean: float
    layers: tuple[LayerDivergence, ...]
    noise_floor: NoiseFloor | None = None

    @property
    def kld_mean(self) -> float:
        """Mean KL, nats."""
        return self.kl.mean

    @property
    def kld_p99(self) -> float:
        """99th percentile of KL, nats."""
        return self.kl.p99

    @property
    def blamed(self) -> LayerDivergence | None:
        """The layer that itself errs most, on the reference's own stream; None if none errs."""
        guilty = [x for x in self.layers if x.forced is not None and x.forced.rel_error]
        return max(guilty, key=_own_error, default=None)

    def to_json(self) -> dict[str, Any]:
        """Return the part of a report's summary that a comparison adds."""
        numbers = {
            "reference": self.reference,
            "reference_bytes": self.reference_bytes,
            **self.kl.to_json(),
            "top1_agreement": self.top1_agreement,
            "router_agreement": self.router_agreement,
            "reference_nll_mean": self.reference_nll_mean,
            "layers": [entry.to_json() for entry in self.layers],
        }
        if any(entry.forced for entry in self.layers):
            numbers["worst_layer"] = self.blamed.layer if self.blamed else None
        if self.noise_floor is not None:
            numbers["noise_floor"] = self.noise_floor.to_json()
        return numbers


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


def summarize(
    scores: Mapping[str, Tensor], meter: LayerMeter, *, reference: str, reference_bytes: int
) -> Divergence:
    """Put together what all passes of a comparison found.

    Args:
        scores: `[n]` by name, see `passes.PassRunner.run`.
        meter: The layers' sums.
        reference: The reference's name.
        reference_bytes: Bytes of its tensors.
    """
    layers = meter.layers()
    floor: NoiseFloor | None = None
    if "twin_kld" in scores:
        floor = NoiseFloor(
            kld_mean=float(scores["twin_kld"].numpy().mean()),
            kld_p99=percentile(scores["twin_kld"], 0.99),
            kld_max=float(scores["twin_kld"].max()),
            top1_agreement=float(scores["twin_same_top1"].double().mean()),
            layers=meter.twin_layers(),
        )
    return Divergence(
        reference=reference,
        reference_bytes=reference_bytes,
        kl=summarize_kl(scores["kld"], scores["confidence"]),
        top1_agreement=float(scores["same_top1"].double().mean()),
        router_agreement=_router_agreement(layers),
        reference_nll_mean=float(scores["reference_nll"].numpy().mean()),
        layers=layers,
        noise_floor=floor,
    )


def _router_agreement(layers: tuple[LayerDivergence, ...]) -> float | None:
    routers = [layer.router for layer in layers if layer.router is not None]
    if not routers or any(router.agreement is None for router in routers):
        return None
    return sum(router.same for router in routers) / sum(router.chosen for router in routers)


def _own_error(layer: LayerDivergence) -> float:
    assert layer.forced is not None
    return layer.forced.rel_error or 0.0
