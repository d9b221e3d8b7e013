"""`k3quant manifest`: create, show and compare manifests."""

from pathlib import Path
from typing import Annotated

import typer

from k3quant.cli.options import JobsOpt, JsonOpt, OutOpt, QuietOpt
from k3quant.cli.output import Output, session, table

app = typer.Typer(
    name="manifest", help="What a checkpoint's files must be: create, show, diff.",
    no_args_is_help=True,
)  # fmt: skip

PlaceArg = Annotated[str, typer.Argument(help="Built-in name (kimi-k3) or manifest file.")]


@app.command()
def create(
    place: Annotated[str, typer.Argument(help="Checkpoint folder, or hf://owner/name@revision.")],
    out: OutOpt,
    name: Annotated[str, typer.Option("--name", help="Name of the manifest.")] = "",
    jobs: JobsOpt = None,
    json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Record sizes and digests; from the Hub, without downloading shards.

    Example: k3quant manifest create ./kimi-k3 --out kimi-k3.json
    """
    with session("manifest create", json=json, quiet=quiet) as say:
        from k3quant.checkpoint.writer import atomic_write
        from k3quant.cli.places import open_source
        from k3quant.manifest_create import create_manifest, encode_manifest

        source, repository, revision = open_source(place)
        manifest = create_manifest(
            source,
            name=name or place.rstrip("/").rpartition("/")[2].partition("@")[0],
            repository=repository,
            revision=revision,
            jobs=jobs,
            progress=say.progress(),
        )
        atomic_write(out, encode_manifest(manifest))
        summary = {"out": str(out), "files": len(manifest.files), "totals": dict(manifest.totals)}
        say.done(summary, [f"{out}: {len(manifest.files)} files of {place}"])


@app.command()
def show(place: PlaceArg, json: JsonOpt = False, quiet: QuietOpt = False) -> None:
    """Print a manifest.

    Example: k3quant manifest show kimi-k3
    """
    with session("manifest show", json=json, quiet=quiet) as say:
        from k3quant.manifest import load_manifest

        manifest = load_manifest(place)
        rows = [
            [file, f"{r.bytes or 0:,}", (r.sha256 or "")[:16], (r.header_sha256 or "")[:16]]
            for file, r in sorted(manifest.files.items())
        ]
        where = f"{manifest.repository or 'no repository'}@{manifest.revision or 'no revision'}"
        totals = [f"{key:18} {value:,}" for key, value in manifest.totals.items()]
        lines = [f"{manifest.name}: {where}", *totals, ""]
        lines += table(["file", "bytes", "sha256", "header sha256"], rows)
        say.done(manifest.to_json(), lines)


@app.command()
def diff(before: PlaceArg, after: PlaceArg, json: JsonOpt = False, quiet: QuietOpt = False) -> None:
    """Compare two manifests, or two folders tensor by tensor; exit 1 where they differ.

    Example: k3quant manifest diff kimi-k3 ours.json
    """
    with session("manifest diff", json=json, quiet=quiet) as say:
        if Path(before).is_dir() and Path(after).is_dir():
            _diff_folders(say, Path(before), Path(after))
        from k3quant.manifest import diff_manifests, load_manifest
        from k3quant.report import FaultClass, Finding, Report

        changes = list(diff_manifests(load_manifest(before), load_manifest(after)))
        findings = tuple(
            Finding(
                code=f"differs-{change.what}",
                fault=FaultClass.COMPARISON,
                subject=change.file,
                message=f"{change.file}: {change.what}: expected {change.before}, "
                f"got {change.after}",
                expected=change.before,
                got=change.after,
            )
            for change in changes
        )
        report = Report(
            command="manifest diff", findings=findings, summary={"differences": len(changes)}
        )
        say.report(report, [f"{before} and {after}: {len(changes)} differences"])


def _diff_folders(say: Output, before: Path, after: Path) -> None:
    """Compare every byte of two checkpoints' tensors, whatever files they lie in."""
    from k3quant.checkpoint.reader import open_checkpoint
    from k3quant.checkpoint.same_tensors import compare_tensors
    from k3quant.report import FaultClass, Finding, Report
    from k3quant.sizes import format_size

    found = compare_tensors(open_checkpoint(before), open_checkpoint(after), say.progress())
    findings = tuple(
        Finding(
            code="differs-tensor",
            fault=FaultClass.COMPARISON,
            subject=change.name,
            message=f"{change.name}: {change.what}: expected {change.before}, got {change.after}",
            expected=change.before,
            got=change.after,
        )
        for change in found.changes
    )
    summary = {
        "differences": len(findings),
        "same_tensors": found.tensors,
        "same_bytes": found.tensor_bytes,
        "same_files": found.same_files,
    }
    files = "the same files" if found.same_files else "other files"
    equal = f"{found.tensors:,} tensors, {format_size(found.tensor_bytes)}"
    line = f"same tensors, same bytes, {files}: {equal}"
    if findings:
        line = f"{len(findings):,} tensors differ; bit for bit the same: {equal}"
    say.report(Report(command="manifest diff", findings=findings, summary=summary), [line])
