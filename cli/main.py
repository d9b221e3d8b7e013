"""The `k3quant` command: one function a subcommand, no logic here."""

from typing import Annotated

import typer

from k3quant import __version__
from k3quant.cli import manifest
from k3quant.cli.convert import convert, requantize
from k3quant.cli.demo import demo
from k3quant.cli.download import download
from k3quant.cli.eval import evaluate, trace
from k3quant.cli.inspect import inspect
from k3quant.cli.repack import repack, synth
from k3quant.cli.report import report
from k3quant.cli.tokens import tokens
from k3quant.cli.verify import verify

app = typer.Typer(
    name="k3quant",
    help="Fetch, prove, relayout, requantize and measure Kimi-K3 checkpoints.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    inspect, verify, download, repack, convert, requantize, trace, report, tokens, synth,
    demo,
):  # fmt: skip
    app.command()(command)
app.command("eval")(evaluate)
app.add_typer(manifest.app)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"k3quant {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Fetch, prove, relayout, requantize and measure Kimi-K3 checkpoints."""


def main() -> None:
    """Run the command line."""
    app()
