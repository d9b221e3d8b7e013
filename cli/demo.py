"""`k3quant demo`: the whole tool on a small trained Kimi-K3, in a few minutes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from k3quant.cli.options import JsonOpt, QuietOpt
from k3quant.cli.output import session, table

if TYPE_CHECKING:
    from k3quant.demo import DemoRow


def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder to write into.")] = Path("demo"),
    json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Verify, convert and evaluate the bundled checkpoint, and print one table.

    Example: k3quant demo --out demo
    """
    with session("demo", json=json, quiet=quiet) as say:
        from k3quant.demo import TARGETS, run_demo

        say.say("kimi-k3-nano: 7 M parameters, 9 layers, the layout of the release")
        rows = []
        for row in run_demo(out, progress=say.progress()):
            rows.append(row)
            say.say(f"{len(rows)} of {len(TARGETS) + 1}: {row.name} verified and evaluated")
        summary = {"out": str(out), "rows": [row.to_json() for row in rows]}
        say.done(summary, _lines(out, rows))


def _lines(out: Path, rows: "list[DemoRow]") -> list[str]:
    from k3quant.sizes import format_size

    cells = []
    for row in rows:
        kl = row.result.divergence
        cells.append(
            [
                row.name,
                format_size(row.expert_bytes),
                row.exact,
                f"{row.result.ppl:.4f}",
                "" if kl is None else f"{kl.kld_mean:.2e}",
                "" if kl is None else f"{kl.kld_p99:.2e}",
                "" if kl is None else f"{kl.top1_agreement:.2%}",
            ]
        )
    heads = ["experts as", "bytes", "exact", "perplexity", "KL mean", "KL p99", "same top-1"]
    score = f"{rows[0].result.tokens_scored:,} tokens scored, context 512; everything is in {out}"
    return [*table(heads, cells), "", score]
