"""`k3quant verify`: prove a checkpoint whole."""

from typing import Annotated

import typer

from k3quant.cli.options import JobsOpt, JsonOpt, ManifestOpt, QuietOpt
from k3quant.cli.output import session


def verify(
    place: Annotated[str, typer.Argument(help="Checkpoint folder.")],
    level: Annotated[
        str,
        typer.Option("--level", help="headers, schema, hash, values; each includes the last."),
    ] = "values",
    manifest: ManifestOpt = None,
    jobs: JobsOpt = None,
    json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Check headers, names, shapes, hashes and values; exit with the class of the worst fault.

    Example: k3quant verify ./kimi-k3 --manifest kimi-k3
    """
    with session("verify", json=json, quiet=quiet) as out:
        from pathlib import Path

        from k3quant.checkpoint.folder import LocalFolder
        from k3quant.errors import UsageError
        from k3quant.manifest import load_manifest
        from k3quant.sizes import format_size
        from k3quant.verify.run import Level, VerifySettings
        from k3quant.verify.run import verify as run

        if level.upper() not in Level.__members__:
            names = ", ".join(name.lower() for name in Level.__members__)
            raise UsageError(f"--level: expected {names}, got `{level}`")
        settings = VerifySettings(
            level=Level[level.upper()],
            manifest=load_manifest(manifest) if manifest else None,
            jobs=jobs,
        )
        report = run(LocalFolder(Path(place)), settings, out.progress())
        found = report.summary
        verdict = "healthy" if report.ok else f"faulty (exit {int(report.exit_code)})"
        out.report(
            report,
            [
                f"{place}: {verdict}: {found['shards_present']} of {found['shards']} shards, "
                f"{found['tensors']:,} tensors, {format_size(found['file_bytes'])}, level {level}"
            ],
        )
