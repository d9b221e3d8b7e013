"""What `k3quant eval` prints for people."""

from typing import TYPE_CHECKING

from k3quant.cli.output import table
from k3quant.sizes import format_size

if TYPE_CHECKING:
    from k3quant.eval.divergence import Divergence
    from k3quant.eval.layer_meter import LayerDivergence
    from k3quant.eval.result import EvalResult


def eval_lines(result: "EvalResult") -> list[str]:
    """Lay out an evaluation; every KL has the noise floor beside it where that was measured."""
    settings = result.settings
    lines = [
        f"perplexity   {result.ppl:.4f}",
        f"nll          {result.nll_mean:.6f} nats over {result.tokens_scored:,} tokens",
        f"windows      {result.windows} of {settings.ctx}, stride {settings.step}",
        f"size         {format_size(result.checkpoint_bytes)}",
        f"read         {format_size(result.bytes_read)} in {result.seconds:.1f} s",
    ]
    if result.resumed_after is not None:
        lines.append(f"resumed      after layer {result.resumed_after} of a saved state")
    return lines if result.divergence is None else lines + _comparison(result.divergence)


def _comparison(found: "Divergence") -> list[str]:
    kl, floor = found.kl, found.noise_floor
    mean, p99 = f"{kl.mean:.3g}", f"{kl.p99:.3g}"
    if floor is not None:
        mean += f" (noise {floor.kld_mean:.3g})"
        p99 += f" (noise {floor.kld_p99:.3g})"
    top1 = f"{found.top1_agreement:.4f}"
    if floor is not None:
        top1 += f" (noise {floor.top1_agreement:.4f})"
    lines = [
        f"KL           mean {mean}, p99 {p99} nats",
        f"             median {kl.median:.3g}, p90 {kl.p90:.3g}, max {kl.maximum:.3g} nats",
        f"agreement    top-1 {top1}, router {_or_none(found.router_agreement, '.4f')}",
    ]
    if floor is not None and kl.mean <= floor.kld_mean:
        lines.append("             the KL is no larger than rounding: nothing is damaged")
    return [*lines, *_layers(found), "", *_by_confidence(found)]


def _layers(found: "Divergence") -> list[str]:
    last = found.layers[-1]
    lines = [f"layers       stream after the last: relative error {_number(last.rel_error)}"]
    if any(layer.forced for layer in found.layers):
        lines.append(_blame(found.blamed))
    else:
        worst = max(found.layers, key=lambda layer: layer.rel_error or 0.0)
        lines.append(f"             worst {worst.layer}: relative error {_number(worst.rel_error)}")
    loaded = [(layer.layer, layer.router) for layer in found.layers if layer.router]
    if loaded:
        number, router = max(loaded, key=lambda both: both[1].candidate.max_over_mean)
        lines.append(
            f"router load  uneven most in layer {number}: busiest expert "
            f"{router.candidate.max_over_mean:.2f} of the average (reference "
            f"{router.reference.max_over_mean:.2f}), {router.candidate.never_chosen} never chosen"
        )
    return lines


def _blame(layer: "LayerDivergence | None") -> str:
    if layer is None or layer.forced is None:
        return "worst layer  none: each gives what the reference's gives on the same input"
    parts = [f"relative error {_number(layer.forced.rel_error)}"]
    for name, gap in (("attention", layer.forced_attention), ("MLP", layer.forced_mlp)):
        if gap is not None:
            parts.append(f"{name} {_number(gap.rel_error)}")
    return f"worst layer  {layer.layer}: on the reference's input {', '.join(parts)}"


def _by_confidence(found: "Divergence") -> list[str]:
    rows = [
        [f"{bucket.low:g} to {bucket.high:g}", f"{bucket.count:,}", _number(bucket.kld_mean)]
        for bucket in found.kl.buckets
    ]
    return table(["reference's top-1", "tokens", "KL mean"], rows)


def _number(value: float | None) -> str:
    return _or_none(value, ".3g")


def _or_none(value: float | None, form: str) -> str:
    return "none" if value is None else format(value, form)
