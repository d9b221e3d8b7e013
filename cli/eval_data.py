"""`k3quant eval --data`: run the model over lines of text with pictures and videos."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from k3quant.cli.output import Output
    from k3quant.eval.data_report import DataResult
    from k3quant.eval.settings import EvalSettings

_SHOWN = 20


def score_data(
    say: "Output",
    checkpoint: Path,
    data: Path,
    *,
    reference: Path | None,
    settings: "EvalSettings",
    out: Path | None,
) -> None:
    """Score the lines, write the report if asked, print it and leave."""
    from k3quant.checkpoint.writer import atomic_write
    from k3quant.eval.data import evaluate_data
    from k3quant.report import Report

    result = evaluate_data(
        checkpoint, data, reference=reference, settings=settings, progress=say.progress()
    )
    report = Report(command="eval", summary=result.to_json())
    if out is not None:
        atomic_write(out, report.encode())
    say.report(report, _lines(result))


def _lines(result: "DataResult") -> list[str]:
    """Lay out the scores of lines of text and media for people."""
    from k3quant.cli.output import table
    from k3quant.sizes import format_size

    found = result.to_json()
    compared = result.divergence is not None
    headers = ["line", "tokens", "media", "scored", "nll", *(["KL"] if compared else [])]
    rows = [
        [
            str(line["line"]),
            f"{line['tokens']:,}",
            f"{line['media_tokens']:,}",
            f"{line['tokens_scored']:,}",
            _number(line["nll_mean"], "{:.4f}"),
            *([_number(line["kld_mean"], "{:.3g}")] if compared else []),
        ]
        for line in found["lines"][:_SHOWN]
    ]
    lines = table(headers, rows)
    if len(found["lines"]) > _SHOWN:
        lines.append(f"and {len(found['lines']) - _SHOWN} more lines; `--json` lists all")
    lines += [
        "",
        f"nll          {result.nll_sum:.4f} nats, {result.nll_mean:.6f} a token over "
        f"{result.tokens_scored:,} tokens",
        f"media        {result.media:,}, {found['media_tokens']:,} tokens",
        f"read         {format_size(result.bytes_read)} in {result.seconds:.1f} s",
    ]
    if result.divergence is None:
        return lines
    kl = result.divergence
    lines += [
        f"KL           mean {kl.kld_mean:.3g}, p99 {kl.kld_p99:.3g} nats",
        f"agreement    top-1 {kl.top1_agreement:.4f}",
    ]
    if kl.features is not None:
        lines.append(f"vision       relative error {_number(kl.features.rel_error, '{:.3g}')}")
    for name, kind in kl.kinds.items():
        if not kind.tokens:
            continue
        worst = max(kind.layers, key=lambda layer: layer.rel_error or 0.0)
        router = _number(kind.router_agreement, "{:.4f}")
        lines.append(
            f"{name:<12} router {router}, worst layer {worst.layer}: relative error "
            f"{_number(worst.rel_error, '{:.3g}')}"
        )
    return lines


def _number(value: float | None, form: str) -> str:
    return "none" if value is None else form.format(value)
