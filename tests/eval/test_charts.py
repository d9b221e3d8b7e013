import re
import xml.etree.ElementTree as ET

import pytest

from k3quant.eval.charts import (
    HEIGHT,
    WIDTH,
    Axis,
    Point,
    Series,
    bar_chart,
    line_chart,
    point_chart,
)

SVG = "{http://www.w3.org/2000/svg}"
NASTY = '<b>&"x"</b>'


def _texts(svg):
    return [element.text for element in ET.fromstring(svg).iter(f"{SVG}text")]


def _places(svg, tag, *keys):
    return [[float(e.get(k)) for k in keys] for e in ET.fromstring(svg).iter(f"{SVG}{tag}")]


def test_a_log_axis_places_decades_evenly():
    axis = Axis(label="", low=1e-4, high=1, start=0, end=100, log=True)
    assert [axis.place(10.0**-i) for i in range(5)] == pytest.approx([100, 75, 50, 25, 0])
    assert axis.place(0.0 + 1e-9) == 0
    assert axis.ticks() == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1, 1])


@pytest.mark.parametrize(
    ("high", "expected"),
    [(6, [0, 1, 2, 3, 4, 5, 6]), (92, [0, 20, 40, 60, 80]), (0.3, [0, 0.05, 0.1, 0.15, 0.2, 0.25,
     0.3])],
)  # fmt: skip
def test_ticks_of_a_plain_axis_are_round(high, expected):
    assert Axis(label="", low=0, high=high, start=0, end=1).ticks() == pytest.approx(expected)


def test_lines_are_drawn_in_scale_and_named():
    lines = [Series(name="free", values=[1e-4, 1e-2]), Series(name="floor", values=[None, 0.0])]
    svg = line_chart("errors", lines, x="layer", y="relative error", log=True)
    (_, first), (_, second) = _places(svg, "circle", "cx", "cy")
    assert second == 44  # the top of the plot, two decades above its base
    assert first == HEIGHT - 52
    assert {"errors", "layer", "relative error", "free", "floor (all 0)"} <= set(_texts(svg))


def test_bars_stand_on_the_base_and_carry_notes():
    svg = bar_chart("kl", ["a", "b", "c"], [1, 2, None], ["one", "two", ""], x="bin", y="tokens")
    bars = _places(svg, "rect", "y", "height")
    assert len(bars) == 2
    assert all(y + height == pytest.approx(HEIGHT - 52, abs=0.1) for y, height in bars)
    assert bars[1][1] == pytest.approx(2 * bars[0][1], abs=0.2)
    assert {"a", "b", "c", "one", "two", "bin", "tokens"} <= set(_texts(svg))


@pytest.mark.parametrize("count", [1, 3, 8])
def test_labels_of_points_neither_meet_nor_leave_the_chart(count):
    points = [Point(label=f"checkpoint-{i}", x=100 + i % 2, y=1e-3 * i) for i in range(count)]
    svg = point_chart("sizes", points, x="size, GB", y="KL", level=("noise floor", 1e-8))
    assert len(_places(svg, "circle", "cx", "cy")) == count
    found = [
        (float(e.get("x")), float(e.get("y")), e.text)
        for e in ET.fromstring(svg).iter(f"{SVG}text")
        if e.text.startswith("checkpoint")
    ]
    assert [text for *_, text in found if text.endswith("(0)")] == ["checkpoint-0 (0)"]
    for i, (x, y, text) in enumerate(found):
        assert 0 < x < x + 6.2 * len(text) < WIDTH
        for other_x, other_y, other in found[i + 1 :]:
            apart = x + 6.2 * len(text) < other_x or other_x + 6.2 * len(other) < x
            assert apart or abs(y - other_y) >= 12


def test_text_is_escaped_everywhere():
    charts = [
        line_chart(NASTY, [Series(name=NASTY, values=[1.0])] * 2, x=NASTY, y=NASTY, log=False),
        bar_chart(NASTY, [NASTY], [1], [NASTY], x=NASTY, y=NASTY),
        point_chart(NASTY, [Point(label=NASTY, x=1, y=1)], x=NASTY, y=NASTY, level=(NASTY, 1)),
    ]
    for svg in charts:
        assert "<b>" not in svg
        assert NASTY in _texts(svg)


@pytest.mark.parametrize("values", [[], [None], [0.0], [5.0]], ids=["none", "gap", "zero", "one"])
@pytest.mark.parametrize("log", [True, False], ids=["log", "plain"])
def test_little_to_draw_is_drawn(values, log):
    svg = line_chart("t", [Series(name="a", values=values)], x="x", y="y", log=log)
    assert not re.search("nan|inf", svg)
    assert ET.fromstring(svg).get("viewBox") == f"0 0 {WIDTH} {HEIGHT}"
