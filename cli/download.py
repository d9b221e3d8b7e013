"""`k3quant download`: a checkpoint that arrives once, whole, and proven."""

from typing import Annotated

import typer

from k3quant.cli.options import (
    DryRunOpt,
    JobsOpt,
    JsonOpt,
    ManifestOpt,
    OutOpt,
    QuietOpt,
    RevisionOpt,
    parse_range,
)
from k3quant.cli.output import session
from k3quant.cli.repack import ExpertsOpt, LayersOpt


def download(
    repository: Annotated[str, typer.Argument(help="owner/name, or owner/name@revision.")],
    out: OutOpt,
    revision: RevisionOpt = None,
    include: Annotated[
        list[str] | None,
        typer.Option("--include", help="Only: a file, a pattern, tokenizer, config, headers."),
    ] = None,
    layers: LayersOpt = None,
    experts: ExpertsOpt = None,
    manifest: ManifestOpt = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Check what is there, without the network.")
    ] = False,
    verify_only: Annotated[
        bool, typer.Option("--verify-only", help="Check what is there against the Hub.")
    ] = False,
    stall_timeout: Annotated[
        float | None,
        typer.Option("--stall-timeout", help="Seconds without bytes before a reconnect; else 30."),
    ] = None,
    limit_rate: Annotated[
        str | None, typer.Option("--limit-rate", help="Most bytes a second, such as 500MB.")
    ] = None,
    accept_new_commit: Annotated[
        bool, typer.Option("--accept-new-commit", help="Go on in a folder of another commit.")
    ] = False,
    rehash: Annotated[
        bool, typer.Option("--rehash", help="Hash again what an earlier run already proved.")
    ] = False,
    dry_run: DryRunOpt = False,
    jobs: JobsOpt = None,
    json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Fetch a repository at one commit, hash it while it arrives, resume where it stopped.

    Example: k3quant download moonshotai/Kimi-K3 --out ./kimi-k3 --manifest kimi-k3
    """
    with session("download", json=json, quiet=quiet) as say:
        from k3quant.hub.client import STALL_TIMEOUT
        from k3quant.hub.download import run_download
        from k3quant.hub.folder_check import check_offline
        from k3quant.hub.plan import plan_download
        from k3quant.hub.reference import parse_reference
        from k3quant.hub.settings import DownloadSettings
        from k3quant.manifest import load_manifest
        from k3quant.report import Report
        from k3quant.sizes import format_size, parse_size

        reference = parse_reference(repository, revision)
        settings = DownloadSettings(
            include=tuple(include or ()),
            layers=parse_range(layers, "--layers"),
            experts=parse_range(experts, "--experts"),
            manifest=load_manifest(manifest) if manifest else None,
            jobs=jobs or 8,
            stall_timeout=STALL_TIMEOUT if stall_timeout is None else stall_timeout,
            rate_limit=parse_size(limit_rate) if limit_rate else None,
            verify_only=verify_only,
            accept_new_commit=accept_new_commit,
            rehash=rehash,
        )
        if offline:
            report = check_offline(out, settings, say.progress())
        elif dry_run:
            plan = plan_download(reference, out, settings, client=settings.client())
            report = Report(command="download", summary=plan.summary())
        else:
            report = run_download(reference, out, settings, say.progress())
        found = report.summary
        lines = [
            f"{key:14} {format_size(value) if key.endswith('bytes') else value}"
            for key, value in found.items()
            if not isinstance(value, (list, dict))
        ]
        say.report(report, lines)
