"""Several reports of `k3quant eval` side by side: size against damage."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from k3quant.errors import IncompleteError, RefusedError, SchemaError, StructureError
from k3quant.eval.charts import Point, point_chart
from k3quant.eval.report_page import html_table, number, page
from k3quant.sizes import format_size

Number = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=0)]
SAME = ("tokens_sha256", "context", "stride", "bos", "tokens_scored")


class _Floor(Struct):
    kld_mean: Number


class _Facts(Struct):
    """What a row shows of a summary; all other keys are left alone."""

    checkpoint: str
    checkpoint_bytes: Count
    ppl: Number | None
    tokens_scored: Count
    reference: str | None = None
    dtype: str | None = None
    kld_mean: Number | None = None
    kld_p99: Number | None = None
    top1_agreement: Number | None = None
    noise_floor: _Floor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRow:
    """One report.

    Attributes:
        file: Its file's name.
        summary: Its summary.
    """

    file: str
    summary: Mapping[str, Any]

    @property
    def label(self) -> str:
        """Name of the checkpoint."""
        return str(self.summary["checkpoint"])

    def to_json(self) -> dict[str, Any]:
        """Return the row ready for JSON; what a report does not have is None."""
        keys = ("checkpoint", "checkpoint_bytes", "reference", "dtype", "tokens_scored", "ppl",
                "kld_mean", "kld_p99", "top1_agreement")  # fmt: skip
        floor = self.summary.get("noise_floor")
        row: dict[str, Any] = {"file": self.file} | {key: self.summary.get(key) for key in keys}
        return row | {"noise_floor_kld_mean": floor and floor["kld_mean"]}

    def cells(self) -> list[str]:
        """Return the row for people."""
        row = self.to_json()
        return [
            self.label,
            format_size(row["checkpoint_bytes"]),
            row["dtype"] or number(None),
            number(row["ppl"], ".4f"),
            number(row["kld_mean"]),
            number(row["kld_p99"]),
            number(row["noise_floor_kld_mean"]),
            number(row["top1_agreement"], ".4f"),
        ]


HEADERS = (
    "checkpoint",
    "size",
    "run in",
    "perplexity",
    "KL mean",
    "KL p99",
    "noise floor",
    "same top-1",
)


def read_reports(paths: Sequence[Path]) -> list[ReportRow]:
    """Read reports that were made of the same tokens.

    Raises:
        IncompleteError: A file is gone.
        StructureError: A file is not JSON.
        SchemaError: A file is no report of `k3quant eval`.
        RefusedError: Reports are of other tokens or windows; their numbers mean nothing together.
    """
    rows = [_read(path) for path in paths]
    first = rows[0]
    for row in rows[1:]:
        for fact in SAME:
            expected, got = first.summary.get(fact), row.summary.get(fact)
            if expected != got:
                raise RefusedError(
                    f"{row.file}: expected {fact} {expected} as in {first.file}, got {got}",
                    hint="compare reports of the same text, read in the same windows",
                )
    return rows


def compare_page(rows: Sequence[ReportRow]) -> str:
    """Return a web page with a table and size against KL."""
    compared = [row for row in rows if row.summary.get("kld_mean") is not None]
    points = [
        Point(
            label=row.label,
            x=row.summary["checkpoint_bytes"] / _unit(rows)[0],
            y=row.summary["kld_mean"],
        )
        for row in compared
    ]
    floors = [
        row.summary["noise_floor"]["kld_mean"] for row in rows if "noise_floor" in row.summary
    ]
    parts = [html_table(HEADERS, [row.cells() for row in rows])]
    if points:
        parts.append(
            point_chart(
                "Size against damage",
                points,
                x=f"size of the checkpoint, {_unit(rows)[1]}",
                y="mean KL, nats",
                level=("noise floor", max(floors)) if floors else None,
            )
        )
    return page("Size against damage", parts)


def _unit(rows: Sequence[ReportRow]) -> tuple[float, str]:
    most = max(row.summary["checkpoint_bytes"] for row in rows)
    return next(((size, name) for size, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"))
                 if most >= size), (1e3, "kB"))  # fmt: skip


def _read(path: Path) -> ReportRow:
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise IncompleteError(f"{path}: expected a report, got nothing") from error
    except ValueError as error:
        raise StructureError(f"{path.name}: expected JSON, got {error}") from error
    summary = document.get("summary") if isinstance(document, dict) else None
    if not isinstance(summary, dict) or not {"checkpoint", "checkpoint_bytes"} <= summary.keys():
        raise SchemaError(
            f"{path.name}: expected a report of `k3quant eval`, got another document",
            hint="`k3quant eval --out FILE` writes one",
        )
    try:
        msgspec.convert(summary, _Facts)
    except msgspec.ValidationError as error:
        raise SchemaError(
            f"{path.name}: expected the numbers of `k3quant eval`, got a summary where "
            f"{str(error)[0].lower()}{str(error)[1:]}",
            hint="write it again with this version",
        ) from error
    return ReportRow(file=path.name, summary=summary)
