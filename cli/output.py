"""The only printer: data on stdout, everything else on stderr, one form for each mode."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer

from k3quant import __version__
from k3quant.errors import ExitCode, K3QuantError, ResourceError
from k3quant.progress import SILENT, Progress
from k3quant.report import Report, Severity, finding_of

_STYLES = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.NOTE: "blue"}
_SHOWN = 40


class Output:
    """Prints what one command has to say.

    Attributes:
        command: Name of the command.
        json: Whether stdout carries one JSON document and nothing else.
        quiet: Whether only errors are printed.
    """

    def __init__(self, command: str, *, json: bool, quiet: bool) -> None:
        self.command = command
        self.json = json
        self.quiet = quiet

    def progress(self) -> Progress:
        """Return a progress bar on stderr, or silence where nobody would see it."""
        if self.json or self.quiet or not sys.stderr.isatty():
            return SILENT
        from k3quant.cli.progress import Bar

        return Bar()

    def report(self, report: Report, lines: Sequence[str] = ()) -> None:
        """Print a report and leave with its exit code.

        Args:
            report: What was found.
            lines: The summary for people.

        Raises:
            Exit: Always, with the report's exit code.
        """
        if self.json:
            _write(report.encode().decode().rstrip())
            raise typer.Exit(int(report.exit_code))
        shown = [f for f in report.findings if not self.quiet or f.severity is Severity.ERROR]
        for finding in shown[:_SHOWN]:
            _say(f"{_word(finding.severity)} {finding.message}")
            if finding.hint and not self.quiet:
                _say(f"  {finding.hint}")
        if len(shown) > _SHOWN:
            _say(f"and {len(shown) - _SHOWN} more findings; `--json` lists all")
        if not self.quiet:
            for line in lines:
                _write(line)
        raise typer.Exit(int(report.exit_code))

    def done(self, summary: dict[str, Any], lines: Sequence[str]) -> None:
        """Print the result of a command that makes no findings, and leave with 0."""
        self.report(Report(command=self.command, summary=summary), lines)

    def say(self, text: str) -> None:
        """Print a line for people on stderr."""
        if not self.json and not self.quiet:
            _say(text)


@contextmanager
def session(command: str, *, json: bool, quiet: bool) -> Iterator[Output]:
    """Run a command's body; an error becomes one line (or one document) and its exit code.

    Raises:
        Exit: An error was reported.
    """
    out = Output(command, json=json, quiet=quiet)
    try:
        yield out
    except K3QuantError as error:
        _fail(out, error)
    except BrokenPipeError:
        # Whoever read stdout has left; keep the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
    except KeyboardInterrupt:
        _say("interrupted; the same command line goes on where it stopped")
        raise typer.Exit(130) from None
    except MemoryError:
        _fail(out, ResourceError("memory: expected enough for one tensor, got less"))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(out, ResourceError(f"{where}{os.strerror(error.errno or 0).lower()}"))


def _fail(out: Output, error: K3QuantError) -> None:
    finding = finding_of(error, subject=out.command, code="error")
    code = ExitCode(error.exit_code)
    if out.json:
        document = {
            "command": out.command,
            "version": __version__,
            "ok": False,
            "exit_code": int(code),
            "findings": [finding.to_json()],
            "summary": {},
        }
        _write(json.dumps(document, indent=1, ensure_ascii=False))
    else:
        _say(f"{_word(Severity.ERROR)} {error.message}")
        if error.hint:
            _say(f"  {error.hint}")
    raise typer.Exit(int(code))


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lay out rows in columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    lines = []
    for row in [headers, ["-" * width for width in widths], *rows]:
        first, *rest = (cell.ljust(w) if i == 0 else cell.rjust(w)
                        for i, (cell, w) in enumerate(zip(row, widths, strict=True)))  # fmt: skip
        lines.append("  ".join([first, *rest]).rstrip())
    return lines


def _word(severity: Severity) -> str:
    return typer.style(f"{severity}:", fg=_STYLES[severity], bold=severity is Severity.ERROR)


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _write(text: str) -> None:
    typer.echo(text)
