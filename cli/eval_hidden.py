"""`k3quant eval --hidden`: the head again, from final hidden states, without a walk."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from k3quant.cli.output import Output
    from k3quant.eval.settings import EvalSettings

CheckpointAndStates = tuple[Path | None, Path | None]


def score_states(
    say: "Output",
    candidate: CheckpointAndStates,
    reference: CheckpointAndStates,
    *,
    settings: "EvalSettings",
    out: Path | None,
) -> None:
    """Score the states, write the report if asked, print it and leave."""
    from k3quant.checkpoint.reader import open_checkpoint
    from k3quant.checkpoint.writer import atomic_write
    from k3quant.errors import UsageError
    from k3quant.eval.hidden_file import rescore
    from k3quant.eval.perplexity import open_model
    from k3quant.report import Report

    if None in candidate or (None in reference and reference != (None, None)):
        raise UsageError(
            "eval: expected --hidden, and --reference with --reference-hidden or neither"
        )
    sides = [
        (open_model(open_checkpoint(folder), settings), states)
        for folder, states in (candidate, reference)
        if folder is not None and states is not None
    ]
    summary = rescore(*sides)
    report = Report(command="eval", summary=summary)
    if out is not None:
        atomic_write(out, report.encode())
    lines = [
        f"nll          {summary['nll_mean']:.6f} nats over {summary['tokens_scored']:,} tokens"
    ]
    if len(sides) == 2:
        lines += [
            f"KL           mean {summary['kld_mean']:.3g}, p99 {summary['kld_p99']:.3g} nats",
            f"agreement    top-1 {summary['top1_agreement']:.4f}",
        ]
    say.report(report, lines)
