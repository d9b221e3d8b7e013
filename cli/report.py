"""`k3quant report`: several reports of `k3quant eval` side by side."""

from pathlib import Path
from typing import Annotated

import typer

from k3quant.cli.options import JsonOpt, QuietOpt
from k3quant.cli.output import session, table


def report(
    reports: Annotated[list[Path], typer.Argument(help="Reports that `k3quant eval --out` wrote.")],
    html: Annotated[
        Path | None, typer.Option("--html", help="Write the comparison as one web page.")
    ] = None,
    json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Compare several evaluations of the same text: size against damage.

    Example: k3quant report nvfp4.json int4.json mxfp8.json --html sizes.html
    """
    with session("report", json=json, quiet=quiet) as say:
        from k3quant.eval.report_table import HEADERS, compare_page, read_reports

        rows = read_reports(reports)
        if html is not None:
            from k3quant.checkpoint.writer import atomic_write

            atomic_write(html, compare_page(rows).encode())
        summary = {"reports": [row.to_json() for row in rows]}
        say.done(summary, table(HEADERS, [row.cells() for row in rows]))
