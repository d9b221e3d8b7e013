"""`k3quant verify`: prove a checkpoint whole."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3quant.cli.options import JobsOpt, JsonOpt, ManifestOpt, QuietOpt, RevisionOpt
from k3quant.cli.output import session

if TYPE_CHECKING:
    from k3quant.report import Report


def verify(
    place: Annotated[str, typer.Argument(help="Checkpoint folder, or hf://owner/name@revision.")],
    level: Annotated[
        str | None,
        typer.Option(
            "--level",
            help="headers, schema, hash, values; each includes the last. "
            "Default: values for a folder, schema for the Hub.",
        ),
    ] = None,
    manifest: ManifestOpt = None,
    revision: RevisionOpt = None,
    stats: Annotated[
        Path | None, typer.Option("--stats", help="Write statistics of every tensor to this file.")
    ] = None,
    junit: Annotated[Path | None, typer.Option("--junit", help="Write JUnit XML.")] = None,
    sarif: Annotated[Path | None, typer.Option("--sarif", help="Write SARIF 2.1.0.")] = None,
    cache: Annotated[
        bool,
        typer.Option(help="Skip files proven before whose size, time and inode are unchanged."),
    ] = True,
    jobs: JobsOpt = None,
    json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Check headers, names, shapes, hashes and values; exit with the class of the worst fault.

    Example: k3quant verify ./kimi-k3 --manifest kimi-k3
    """
    with session("verify", json=json, quiet=quiet) as out:
        from contextlib import nullcontext

        from k3quant.checkpoint.writer import atomic_write
        from k3quant.cli.places import open_source
        from k3quant.errors import UsageError
        from k3quant.manifest import load_manifest
        from k3quant.verify.junit import to_junit
        from k3quant.verify.proven import ProvenFiles
        from k3quant.verify.run import Level, VerifySettings
        from k3quant.verify.run import verify as run
        from k3quant.verify.sarif import to_sarif
        from k3quant.verify.stats import encode_stats

        source, repository, commit = open_source(place, revision)
        word = level or ("values" if repository is None else "schema")
        if word.upper() not in Level.__members__:
            names = ", ".join(name.lower() for name in Level.__members__)
            raise UsageError(f"--level: expected {names}, got `{word}`")
        depth = Level[word.upper()]
        if repository is not None and (depth > Level.SCHEMA or stats):
            raise UsageError(
                f"--level: expected headers or schema for hf://{repository}, got `{word}`",
                hint="payload is read from a folder; `k3quant download` checks what it fetches",
            )
        expected = load_manifest(manifest) if manifest else None
        tensors: dict[str, Any] = {}
        with ProvenFiles() if cache and depth > Level.SCHEMA else nullcontext() as proven:
            settings = VerifySettings(
                level=depth,
                manifest=expected,
                jobs=jobs,
                proven=proven,
                stats=tensors.__setitem__ if stats else None,
            )
            report = run(source, settings, out.progress())
        if stats:
            atomic_write(stats, encode_stats(tensors))
        if junit:
            atomic_write(junit, to_junit(report).encode())
        if sarif:
            atomic_write(sarif, to_sarif(report).encode())
        lines = _lines(place if commit is None else f"hf://{repository}@{commit}", report)
        if expected is not None and expected.repository and not report.ok:
            lines += _repair(place, expected.repository, expected.revision, report)
        out.report(report, lines)


def _lines(place: str, report: "Report") -> list[str]:
    from k3quant.sizes import format_size

    found = report.summary
    verdict = "healthy" if report.ok else f"faulty (exit {int(report.exit_code)})"
    known = f", {found['remembered']} remembered" if found["remembered"] else ""
    return [
        f"{place}: {verdict}: {found['shards_present']} of {found['shards']} shards{known}, "
        f"{found['tensors']:,} tensors, {format_size(found['file_bytes'])}, level {found['level']}"
    ]


def _repair(place: str, repository: str, revision: str | None, report: "Report") -> list[str]:
    """Return the command that fetches the bad files again and nothing else."""
    codes = {"missing-file", "short-file", "long-file", "hash", "header-hash"}
    bad = sorted({f.subject for f in report.findings if f.code in codes})
    if not bad:
        return []
    what = " ".join(f"--include {file}" for file in bad)
    where = f"{repository}@{revision}" if revision else repository
    return [f"repair: k3quant download {where} --out {place} {what}"]
