"""Charts as SVG."""

from __future__ import annotations

import json
import math
import re

import pytest

from zengine.reporting.chart import (
    BASE,
    Line,
    embedded,
    label,
    line_chart,
    moving_average,
    stacked_chart,
    thin,
    ticks,
)


def test_a_gap_interrupts_the_line():
    chart = line_chart("t", "u", [Line("a", [(1, 1.0), (2, 2.0), (3, math.nan), (4, 3.0), (5, 2.5)])])
    (path,) = re.findall(r' d="([^"]*)"', chart)
    assert path.count("M") == 2
    assert path.count("L") == 2


def test_stacked_areas_add_up():
    chart = stacked_chart("t", "ms", [Line("a", [(0, 1.0), (1, 1.0)]), Line("b", [(0, 2.0), (1, 2.0)])])
    lower, upper = re.findall(r'<path class="area[^"]*" d="([^"]*)"', chart)
    tops = [float(re.search(r"M\S+ (\S+?)L", path).group(1)) for path in (lower, upper)]
    base = BASE
    assert (base - tops[1]) == pytest.approx(3 * (base - tops[0]), rel=0.01)


def test_nothing_to_draw_draws_nothing():
    assert line_chart("t", "u", [Line("a", [])]) == ""
    assert line_chart("t", "u", [Line("a", [(1, math.nan)])]) == ""
    assert stacked_chart("t", "u", []) == ""


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 4.4), (0, 15_000), (0, 2e-3), (3, 3), (950, 1300)])
def test_ticks_are_few_round_numbers_within_the_range(low, high):
    values = ticks(low, high)
    assert 1 <= len(values) <= 7
    assert all(low - 1e-9 <= value <= high + 1e-9 for value in values)


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (1500, "1.5k"), (5e-4, "5e-4"), (1.5e-3, "1.5e-3"), (2.5, "2.5")]
)
def test_labels_are_short(value, text):
    assert label(value) == text


def test_smoothing_keeps_a_straight_line_and_thinning_keeps_the_mean():
    line = [(i, 2.0 * i) for i in range(1000)]
    assert [y for _, y in moving_average(line, 25)] == pytest.approx([y for _, y in line])
    few = thin(line, 100)
    assert len(few) == 100
    assert sum(y for _, y in few) / 100 == pytest.approx(999.0)


def test_a_point_between_two_gaps_is_a_dot():
    chart = line_chart("t", "u", [Line("a", [(1, math.nan), (2, 2.0), (3, math.nan), (4, 3.0)])])
    (path,) = re.findall(r' d="([^"]*)"', chart)
    assert path.count("h0") == 2


def test_an_axis_may_begin_below_the_data():
    lines = [Line("a", [(1, 100.0), (2, 110.0)])]
    assert ">0</text>" in line_chart("t", "u", lines)
    assert ">0</text>" not in line_chart("t", "u", lines, low=math.nan)
    assert line_chart("t", "u", [Line("a", [(1, 5.0)])], low=math.nan)  # one point, no range


def test_events_are_marked_where_they_are_in_the_picture():
    chart = line_chart("t", "u", [Line("a", [(1, 1.0), (9, 2.0)])], events=[3, 5, 20])
    (path,) = re.findall(r'class="event" d="([^"]*)"', chart)
    assert path.count("M") == 2


def test_more_series_than_colours_begin_again():
    chart = stacked_chart("t", "u", [Line(str(i), [(0, 1.0), (1, 1.0)]) for i in range(9)])
    assert chart.count('class="area f1"') == 2
    assert "f9" not in chart


def test_what_is_embedded_cannot_end_its_element():
    text = embedded({"name": "</script><!--<script>"})
    inner = text.removeprefix('<script type="application/json">').removesuffix("</script>")
    assert "<" not in inner
    assert json.loads(inner)["name"] == "</script><!--<script>"
