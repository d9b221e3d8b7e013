"""One web page of an evaluation's report: tables and charts, nothing from elsewhere, no script."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from k3quant.eval.charts import Series, bar_chart, line_chart
from k3quant.sizes import format_size

Facts = Mapping[str, Any]
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #111827; background: #fff;
       max-width: 800px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #e5e7eb; }
th:first-child, td:first-child { text-align: left; }
svg { width: 100%; height: auto; margin: 1rem 0; }
svg .title { font-size: 14px; font-weight: 600; fill: #111827; }
svg .axis { font-size: 12px; }
p.note { color: #4b5563; }
"""


def eval_page(report: Facts) -> str:
    """Return the page of one report of `k3quant eval`, as its JSON says."""
    summary: Facts = report["summary"]
    parts = [_summary(summary)]
    if "layers" in summary:
        parts += _charts(summary)
    name = summary.get("checkpoint") or "checkpoint"
    against = f" against {summary['reference']}" if summary.get("reference") else ""
    return page(f"{name}{against}", [*parts, f'<p class="note">k3quant {report["version"]}</p>'])


def page(title: str, parts: Sequence[str]) -> str:
    """Return a page with a title; `parts` are HTML, the title is text."""
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            *parts,
            "</body></html>",
            "",
        ]
    )


def html_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of text cells."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in headers)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def number(value: float | None, form: str = ".3g") -> str:
    """Return a number as text, a dash for None."""
    return "–" if value is None else format(value, form)  # noqa: RUF001  an en dash


def _summary(found: Facts) -> str:
    floor: Facts = found.get("noise_floor") or {}
    rows = [
        ("perplexity", number(found["ppl"], ".4f"), ""),
        ("nll, nats a token", number(found["nll_mean"], ".6f"), ""),
        ("tokens scored", f"{found['tokens_scored']:,}", ""),
        ("context, stride", f"{found['context']:,}, {found['stride']:,}", ""),
        ("dtype, device", f"{found['dtype']}, {found['device']}", ""),
        ("size of the checkpoint", format_size(found["checkpoint_bytes"]), ""),
    ]
    for key, name in (("mean", "mean"), ("median", "median"), ("p90", "p90"), ("p99", "p99"),
                      ("max", "maximum")):  # fmt: skip
        if f"kld_{key}" in found:
            noise = floor.get(f"kld_{key}")
            rows.append((f"KL, {name}, nats", number(found[f"kld_{key}"]), _noise(noise)))
    if "top1_agreement" in found:
        noise = floor.get("top1_agreement")
        rows.append(("same top-1", number(found["top1_agreement"], ".4f"), _noise(noise, ".4f")))
        rows.append(("same experts", number(found["router_agreement"], ".4f"), ""))
    if found.get("worst_layer") is not None:
        rows.append(("worst layer by its own error", str(found["worst_layer"]), ""))
    return html_table(["", "", "noise floor"], rows)


def _noise(value: float | None, form: str = ".3g") -> str:
    return "" if value is None else format(value, form)


def _charts(found: Facts) -> list[str]:
    charts = [_histogram(found["kld_histogram"]), _confidence(found["kld_by_confidence"])]
    layers: Sequence[Facts] = found["layers"]
    free = Series(name="free running", values=[x["rel_error"] for x in layers])
    lines = [free]
    forced = any("forced_rel_error" in x for x in layers)
    if forced:
        values = [x.get("forced_rel_error") for x in layers]
        lines.append(Series(name="on the reference's input", values=values))
    if "noise_floor" in found:
        noise = [x["rel_error"] for x in found["noise_floor"]["layers"]]
        lines.append(Series(name="noise floor", values=noise))
    title = "Error of the residual stream after each layer"
    charts.append(line_chart(title, lines, x="layer", y="relative error", log=True))
    halves = [
        Series(name=name, values=[x.get(name, {}).get("forced_rel_error") for x in layers])
        for name in ("attention", "mlp")
    ]
    if any(value is not None for half in halves for value in half.values):
        title = "Error of each half's output on the reference's input"
        charts.append(line_chart(title, halves, x="layer", y="relative error", log=True))
    return charts + _routers(layers)


def _routers(layers: Sequence[Facts]) -> list[str]:
    if not any("router_load" in x for x in layers):
        return []
    loads = [
        Series(
            name=side,
            values=[
                x["router_load"][side]["max_over_mean"] if "router_load" in x else None
                for x in layers
            ],
        )
        for side in ("reference", "candidate")
    ]
    title = "Busiest expert of each layer"
    charts = [line_chart(title, loads, x="layer", y="load over the average", log=False)]
    same = Series(name="agreement", values=[x.get("router_agreement") for x in layers])
    if any(value is not None for value in same.values):
        title = "Chosen experts that both sides choose"
        charts.append(line_chart(title, [same], x="layer", y="share", log=False))
    return charts


def _histogram(found: Facts) -> str:
    edges, counts = found["log10_edges"], found["counts"]
    kept = [i for i, count in enumerate(counts) if count]
    first, last = (kept[0], kept[-1] + 1) if kept else (0, 1)
    # Whole decades are labelled, at the bar that begins there.
    labels = [f"1e{edge:.0f}" if edge == int(edge) else "" for edge in edges[first:last]]
    bars: list[float | None] = [*counts[first:last]]
    notes = [f"{count:,}" if count else "" for count in counts[first:last]]
    if found["below"]:
        labels, bars = ["less", *labels], [found["below"], *bars]
        notes = [f"{found['below']:,}", *notes]
    title = "KL of the scored tokens"
    return bar_chart(title, labels, bars, notes, x="KL from here on, nats", y="tokens")


def _confidence(found: Sequence[Facts]) -> str:
    labels = [f"{x['from']:g} to {x['to']:g}" for x in found]
    values = [x["kld_mean"] for x in found]
    notes = [
        f"{number(x['kld_mean'])} ({x['count']:,})" if x["count"] else "no tokens" for x in found
    ]
    return bar_chart(
        "Mean KL by the reference's confidence (number of tokens)",
        labels,
        values,
        notes,
        x="probability of the reference's likeliest id",
        y="mean KL, nats",
    )
