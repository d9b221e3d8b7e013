"""Options that are spelled the same everywhere."""

from pathlib import Path
from typing import Annotated

import typer

JsonOpt = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else there.")
]
QuietOpt = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors alone.")]
JobsOpt = Annotated[
    int | None, typer.Option("--jobs", min=1, help="Work on this many shards at once.")
]
OutOpt = Annotated[Path, typer.Option("--out", help="Folder or file to write.")]
ManifestOpt = Annotated[
    str | None,
    typer.Option("--manifest", help="Built-in name (kimi-k3), manifest file, or SHA256SUMS."),
]
RevisionOpt = Annotated[
    str | None, typer.Option("--revision", help="Branch, tag or commit of a Hub repository.")
]
DryRunOpt = Annotated[bool, typer.Option("--dry-run", help="Plan and print, write nothing.")]


def parse_range(text: str | None, option: str) -> tuple[int, int] | None:
    """Read an inclusive range such as `0-3` or `5`.

    Raises:
        UsageError: The text is no range.
    """
    if text is None:
        return None
    from k3quant.repack.settings import parse_span

    return parse_span(text, what=option)
