"""Charts as SVG text for one web page: lines, bars and labelled points, with units on every axis.

A chart is `WIDTH` by `HEIGHT` units; what is drawn lies inside its margins. Text is escaped here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 320
LEFT, RIGHT, TOP, BOTTOM = 76, 24, 44, 52
COLORS = ("#1f5fa8", "#c2410c", "#6b7280", "#15803d")
TICKS = 6
# Heights at which a label is tried: beside its point, then ever further above and below.
RISES = tuple(4.0 + 14 * (-1) ** i * ((i + 1) // 2) for i in range(32))
CHARACTER = 6.2  # width of one at the size of labels


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A named line; None leaves a gap, and so does zero on a log axis."""

    name: str
    values: Sequence[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A labelled point; on a log axis one at zero lies on the axis."""

    label: str
    x: float
    y: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A range of values and where it is drawn.

    Attributes:
        label: What it counts, with its unit.
        low: Value at the beginning.
        high: Value at the end.
        start: Place of `low`.
        end: Place of `high`.
        log: Whether steps are factors.
    """

    label: str
    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def place(self, value: float) -> float:
        """Return where a value lies; what is out of range lies at the nearer end."""
        low, high = self.low, self.high
        value = min(max(value, low), high)
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return round values, ten at most."""
        if self.log:
            first, last = round(math.log10(self.low)), round(math.log10(self.high))
            powers = range(first, last + 1, max(1, -(-(last - first) // TICKS)))
            return [10.0**power for power in powers]
        step = _round_step((self.high - self.low) / TICKS)
        begin, end = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [step * i for i in range(begin, end + 1)]


def line_chart(title: str, series: Sequence[Series], *, x: str, y: str, log: bool) -> str:
    """Draw lines over 0, 1, 2 and so on.

    Args:
        title: The chart's title.
        series: The lines, all of one length.
        x: Label of the axis below.
        y: Label of the axis to the left.
        log: Whether the axis to the left is logarithmic.
    """
    count = max(len(line.values) for line in series)
    found = [v for line in series for v in line.values if v is not None and (v > 0 or not log)]
    across = Axis(label=x, low=0, high=max(1, count - 1), start=LEFT, end=WIDTH - RIGHT)
    up = _upward(y, found, log=log)
    parts = []
    for line, color in zip(series, COLORS, strict=False):
        places = [
            (across.place(i), up.place(value))
            for i, value in enumerate(line.values)
            if value is not None and (value > 0 or not log)
        ]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5" fill="{color}"/>' for a, b in places]
    names = [_name(line) for line in series]
    whole = [tick for tick in across.ticks() if tick == int(tick)]
    return _frame(title, [*_across(across, whole), *_up(up), *parts, *_legend(names)])


def _name(line: Series) -> str:
    """Return a line's name, which says so where it has nothing to draw on a log axis."""
    known = [value for value in line.values if value is not None]
    return f"{line.name} (all 0)" if known and not any(known) else line.name


def bar_chart(
    title: str,
    labels: Sequence[str],
    values: Sequence[float | None],
    notes: Sequence[str],
    *,
    x: str,
    y: str,
) -> str:
    """Draw bars.

    Args:
        title: The chart's title.
        labels: Below each bar; an empty one is left out.
        values: Heights; None draws nothing.
        notes: Above each bar.
        x: Label of the axis below.
        y: Label of the axis to the left.
    """
    up = _upward(y, [0.0, *(value for value in values if value is not None)], log=False)
    width = (WIDTH - RIGHT - LEFT) / len(values)
    parts = []
    for i, (label, value, note) in enumerate(zip(labels, values, notes, strict=True)):
        left, middle = LEFT + i * width + 0.1 * width, LEFT + (i + 0.5) * width
        top = up.place(value or 0.0)
        if value is not None:
            parts.append(
                f'<rect x="{left:.1f}" y="{top:.1f}" width="{0.8 * width:.1f}" '
                f'height="{up.start - top:.1f}" fill="{COLORS[0]}"/>'
            )
        if note:
            parts.append(_text(middle, top - 5, note, anchor="middle"))
        parts.append(_text(middle, HEIGHT - BOTTOM + 16, label, anchor="middle"))
    return _frame(title, [*_up(up), *parts, _below(x)])


def point_chart(
    title: str, points: Sequence[Point], *, x: str, y: str, level: tuple[str, float] | None = None
) -> str:
    """Draw labelled points, the axis to the left logarithmic.

    Args:
        title: The chart's title.
        points: The points.
        x: Label of the axis below.
        y: Label of the axis to the left.
        level: Name and height of a line across; None draws none.
    """
    heights = [point.y for point in points] + ([level[1]] if level else [])
    up = _upward(y, [height for height in heights if height > 0], log=True)
    most = max((point.x for point in points), default=1.0)
    across = Axis(label=x, low=0, high=(most or 1.0) * 1.08, start=LEFT, end=WIDTH - RIGHT)
    parts: list[str] = []
    taken: list[tuple[float, float, float]] = []
    if level is not None and level[1] > 0:
        height = up.place(level[1])
        parts += [
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height:.1f}" y2="{height:.1f}" '
            f'stroke="{COLORS[2]}" stroke-dasharray="6 4"/>',
            _text(LEFT + 6, height - 5, level[0]),
        ]
        taken.append((LEFT, WIDTH, height + 4))
    for point in sorted(points, key=lambda p: (p.x, p.y)):
        a, b = across.place(point.x), up.place(max(point.y, up.low))
        parts.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4.5" fill="{COLORS[0]}"/>')
        label = point.label if point.y > 0 else f"{point.label} (0)"
        parts.append(_label_point(label, a, b, taken))
    return _frame(title, [*_across(across, across.ticks()), *_up(up), *parts])


def _label_point(label: str, a: float, b: float, taken: list[tuple[float, float, float]]) -> str:
    """Place a label beside its point where no earlier one lies; `taken` holds left, right, y."""
    length = CHARACTER * len(label)
    for rise in RISES:
        for left in (a + 8, a - 8 - length):
            inside = left > LEFT and left + length < WIDTH and TOP < b + rise < HEIGHT - BOTTOM
            free = all(
                left > r or left + length < lf or abs(b + rise - h) > 12 for lf, r, h in taken
            )
            if inside and free:
                taken.append((left, left + length, b + rise))
                return _text(left, b + rise, label)
    taken.append((a + 8, a + 8 + length, b + 4))
    return _text(a + 8, b + 4, label)


def _upward(label: str, values: Sequence[float], *, log: bool) -> Axis:
    start, end = HEIGHT - BOTTOM, TOP
    if log:
        low = 10.0 ** math.floor(math.log10(min(values, default=0.1)))
        high = 10.0 ** math.ceil(math.log10(max(values, default=1.0)))
        high = high if high > low else 10 * low
    else:
        low, high = min(0.0, *values, 0.0), max(0.0, *values, 0.0) * 1.08
        high = high if high > low else low + 1.0
    return Axis(label=label, low=low, high=high, start=start, end=end, log=log)


def _round_step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))


def _number(value: float) -> str:
    return f"{value:.4g}".replace("e-0", "e-").replace("e+0", "e")


def _text(x: float, y: float, text: str, *, anchor: str = "start", kind: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(text)}</text>'


def _across(axis: Axis, ticks: Sequence[float]) -> list[str]:
    places = [(axis.place(tick), tick) for tick in ticks]
    return [_text(a, HEIGHT - BOTTOM + 16, _number(t), anchor="middle") for a, t in places] + [
        _below(axis.label)
    ]


def _below(label: str) -> str:
    return _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, label, anchor="middle", kind="axis")


def _up(axis: Axis) -> list[str]:
    parts = []
    for tick in axis.ticks():
        height = axis.place(tick)
        parts += [
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height:.1f}" y2="{height:.1f}" '
            'stroke="#e5e7eb"/>',
            _text(LEFT - 8, height + 4, _number(tick), anchor="end"),
        ]
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = f'<g transform="rotate(-90 16 {middle:.1f})">'
    return [*parts, turned, _text(16, middle, axis.label, anchor="middle", kind="axis"), "</g>"]


def _legend(names: Sequence[str]) -> list[str]:
    if len(names) < 2:
        return []
    parts, left = [], float(WIDTH - RIGHT) - sum(26 + CHARACTER * len(name) for name in names)
    for name, color in zip(names, COLORS, strict=False):
        parts.append(f'<rect x="{left:.1f}" y="30" width="12" height="4" fill="{color}"/>')
        parts.append(_text(left + 16, 36, name))
        left += 26 + CHARACTER * len(name)
    return parts


def _frame(title: str, parts: Sequence[str]) -> str:
    base = HEIGHT - BOTTOM
    return "\n".join(
        [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" '
            'xmlns="http://www.w3.org/2000/svg" font-family="system-ui, sans-serif" '
            'font-size="11" fill="#374151">',
            _text(LEFT, 18, title, kind="title"),
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}" stroke="#6b7280"/>',
            *parts,
            "</svg>",
        ]
    )
