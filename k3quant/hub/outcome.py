"""What a download, or a check of one, has to say."""

from typing import Any

from k3quant.hub.digest import Mismatch, Proof
from k3quant.hub.existing import Verdicts, foreign_partials
from k3quant.hub.plan import DownloadPlan
from k3quant.hub.record import DownloadRecord
from k3quant.report import FaultClass, Finding, Report, Severity
from k3quant.sizes import format_size


def notes_of(plan: DownloadPlan, record: DownloadRecord) -> list[Finding]:
    """Return what a finished download should say besides its numbers."""
    notes: list[Finding] = []
    unproven = sorted(n for n, f in record.fetched.items() if f.proof == "size")
    if unproven:
        notes.append(
            Finding(
                code="unproven",
                fault=FaultClass.HASH,
                severity=Severity.WARNING,
                subject=unproven[0],
                message=f"{unproven[0]}: expected a digest to compare with, got only sizes for "
                f"{len(unproven)} files",
                got=len(unproven),
                hint="the endpoint lists no digests; compare with a manifest by `--manifest`",
            )
        )
    strays = plan.strays
    if strays:
        size = sum(file.size for file in strays)
        notes.append(
            Finding(
                code="strays-left",
                fault=FaultClass.STRUCTURE,
                severity=Severity.NOTE,
                subject=strays[0].name,
                message=f"{len(strays)} files ({format_size(size)}) not in index, not fetched: "
                f"{', '.join(file.name for file in strays[:5])}",
                got=size,
            )
        )
    foreign = foreign_partials(plan.out)
    if foreign:
        size = sum(foreign.values())
        notes.append(
            Finding(
                code="foreign-partials",
                fault=FaultClass.INCOMPLETE,
                severity=Severity.NOTE,
                subject=min(foreign),
                message=f"{len(foreign)} unfinished files ({format_size(size)}) of another "
                "download client lie below the folder",
                got=size,
                hint="no later run of that client uses them; remove them by hand",
            )
        )
    return notes


def mismatch_finding(name: str, mismatch: Mismatch, severity: Severity) -> Finding:
    """Return the finding about a file of the wrong bytes; a warning where it is fetched again."""
    replaced = severity is Severity.WARNING
    return Finding(
        code="replaced" if replaced else "hash-mismatch",
        fault=FaultClass.HASH,
        severity=severity,
        subject=name,
        message=f"{name}: expected {mismatch.expected}, got {mismatch.got}"
        + (" (removed, and fetched again)" if replaced else ""),
        expected=mismatch.expected,
        got=mismatch.got,
        hint="" if replaced else "run the download without `--verify-only` to fetch it again",
    )


def wrong_sizes(plan: DownloadPlan, severity: Severity) -> list[Finding]:
    """Return the findings about files of the wrong size; warnings where they are replaced."""
    findings: list[Finding] = []
    for name in sorted(plan.wanted.keys() - plan.present):
        path, size = plan.out / name, plan.wanted[name].bytes
        if not path.is_file():
            continue
        got = path.stat().st_size
        replaced = severity is Severity.WARNING
        findings.append(
            Finding(
                code="replaced" if replaced else "wrong-size",
                fault=FaultClass.INCOMPLETE,
                severity=severity,
                subject=name,
                message=f"{name}: expected {size} bytes, got {got}"
                + (" (replaced)" if replaced else ""),
                expected=size,
                got=got,
                hint="" if replaced else "run the download without `--verify-only` to fetch it",
            )
        )
    return findings


def report_check(plan: DownloadPlan, verdicts: Verdicts) -> Report:
    """Return what a check against the Hub's listing found."""
    findings = [
        mismatch_finding(name, verdict, Severity.ERROR)
        for name, verdict in verdicts.items()
        if isinstance(verdict, Mismatch)
    ]
    findings += wrong_sizes(plan, Severity.ERROR)
    absent = [n for n in sorted(plan.wanted.keys() - plan.present) if not (plan.out / n).exists()]
    for name in absent:
        size, got = plan.wanted[name].bytes, plan.partial.get(name)
        findings.append(
            Finding(
                code="missing-file" if got is None else "partial-file",
                fault=FaultClass.INCOMPLETE,
                subject=name,
                message=f"{name}: expected {size} bytes, got {'no file' if got is None else got}",
                expected=size,
                got=got,
                hint="run the download without `--verify-only` to fetch it",
            )
        )
    proofs: dict[str, int] = {}
    for verdict in verdicts.values():
        by = verdict.by if isinstance(verdict, Proof) else "mismatch"
        proofs[by] = proofs.get(by, 0) + 1
    summary: dict[str, Any] = plan.summary() | {
        "state": plan.record.state if plan.record else None,
        "proofs": proofs,
        "missing_files": len(absent),
    }
    return Report(command="download", findings=tuple(findings), summary=summary)
