"""Findings and reports: what a check says, in one form for people, JSON and CI."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from k3quant import __version__
from k3quant.errors import ExitCode, K3QuantError


class FaultClass(StrEnum):
    """The class of a finding; each has one exit code."""

    INCOMPLETE = "incomplete"
    STRUCTURE = "structure"
    SCHEMA = "schema"
    HASH = "hash"
    VALUES = "values"
    IO = "io"
    REFUSED = "refused"
    COMPARISON = "comparison"


class Severity(StrEnum):
    """`ERROR` decides the exit code; `WARNING` and `NOTE` never do."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


# With several faults the exit code is that of the first class found in this order.
EXIT_ORDER = (
    (FaultClass.INCOMPLETE, ExitCode.INCOMPLETE),
    (FaultClass.STRUCTURE, ExitCode.STRUCTURE),
    (FaultClass.SCHEMA, ExitCode.SCHEMA),
    (FaultClass.HASH, ExitCode.HASH),
    (FaultClass.VALUES, ExitCode.VALUES),
    (FaultClass.IO, ExitCode.IO),
    (FaultClass.REFUSED, ExitCode.REFUSED),
    (FaultClass.COMPARISON, ExitCode.FINDINGS),
)
_CLASS_OF_EXIT = {code: fault for fault, code in EXIT_ORDER}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fact a check found.

    Attributes:
        code: Short stable identifier such as `short-file`; scripts match on it.
        fault: Class of the fault.
        severity: Whether it decides the exit code.
        subject: The file, tensor or key it is about.
        message: Subject, colon, expected, got, in one line.
        expected: The right value, as text or number; None where there is none.
        got: The value found.
        hint: What to do next.
    """

    code: str
    fault: FaultClass
    severity: Severity = Severity.ERROR
    subject: str
    message: str
    expected: str | int | float | None = None
    got: str | int | float | None = None
    hint: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the finding in its published form, with `class` for the fault class."""
        fields = asdict(self)
        fields["class"] = fields.pop("fault")
        order = ("code", "class", "severity", "subject", "message", "expected", "got", "hint")
        return {key: fields[key] for key in order}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a command found and measured.

    Attributes:
        command: Name of the command.
        findings: All findings, in the order they were made.
        summary: The command's numbers, ready for JSON.
    """

    command: str
    findings: tuple[Finding, ...] = ()
    summary: dict[str, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> ExitCode:
        """Exit code of the first class of error found, in `EXIT_ORDER`."""
        return exit_code_of(self.findings)

    @property
    def ok(self) -> bool:
        """Whether no finding is an error."""
        return self.exit_code is ExitCode.GOOD

    def to_json(self) -> dict[str, Any]:
        """Return the report in its published form."""
        return {
            "command": self.command,
            "version": __version__,
            "ok": self.ok,
            "exit_code": int(self.exit_code),
            "findings": [finding.to_json() for finding in self.findings],
            "summary": self.summary,
        }

    def encode(self) -> bytes:
        """Return the report as JSON, for its file."""
        return (json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n").encode()


def exit_code_of(findings: Iterable[Finding]) -> ExitCode:
    """Return the exit code that a list of findings asks for."""
    faults = {finding.fault for finding in findings if finding.severity is Severity.ERROR}
    for fault, code in EXIT_ORDER:
        if fault in faults:
            return code
    return ExitCode.GOOD


def fault(
    kind: FaultClass,
    code: str,
    subject: str,
    message: str,
    expected: str | int | float | None = None,
    got: str | int | float | None = None,
    *,
    hint: str = "",
) -> Finding:
    """Return a finding that decides the exit code."""
    return Finding(
        code=code,
        fault=kind,
        subject=subject,
        message=message,
        expected=expected,
        got=got,
        hint=hint,
    )


def finding_of(error: K3QuantError, *, subject: str, code: str) -> Finding:
    """Turn an error that was answered into a finding about `subject`."""
    return Finding(
        code=code,
        fault=_CLASS_OF_EXIT.get(error.exit_code, FaultClass.IO),
        subject=subject,
        message=error.message,
        hint=error.hint,
    )
