"""Charts as SVG text, without script libraries, network or image files.

Two kinds over the step number: lines, and stacked areas.  Colours are CSS variables of the page (`--series-1` ...),
so one drawing serves a light and a dark page.  Every chart carries its points as JSON for the page's small hover
script; without scripts it is complete as drawn.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

__all__ = ["CLIP", "Line", "label", "line_chart", "moving_average", "stacked_chart", "thin", "ticks"]

WIDTH, HEIGHT = 560, 262  # of the drawing, in user units; it scales with the page
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 10, 40  # margins around the plot
BASE = HEIGHT - BOTTOM  # where the horizontal axis lies
LEAST = 1e-290  # smallest difference between two ticks
LIMIT = 1e300  # values beyond it, whose differences overflow, are not drawn
MAX_POINTS = 400  # of a line; more are not distinguishable
MAX_AREA_POINTS = 160
NUM_COLOURS = 8  # of the style sheet; more series reuse them
# Clip path of all plots, once in a page.
CLIP = (
    '<svg width="0" height="0" style="position:absolute" aria-hidden="true"><clipPath id="plot">'
    f'<rect x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" height="{BASE - TOP}"/></clipPath></svg>'
)

Point = tuple[float, float]  # (step, value)


@attrs.frozen
class Line:
    """One series.  Points that are not finite leave a gap."""

    name: str
    points: Sequence[Point]  # by step
    faint: bool = False  # drawn thin and pale: raw data behind the smoothed line that follows
    colour: int = 0  # of an area, from 1; 0: the next one


def thin(points: Sequence[Point], at_most: int = MAX_POINTS) -> list[Point]:
    """Average neighbours, so that a long run draws as fast as a short one."""
    group = math.ceil(len(points) / at_most) or 1
    points = [(x, y if abs(y) < LIMIT else math.nan) for x, y in points]
    groups = [points[i : i + group] for i in range(0, len(points), group)]
    return [(sum(x for x, _ in each) / len(each), _mean([y for _, y in each])) for each in groups]


def moving_average(points: Sequence[Point], span: int) -> list[Point]:
    """Average over about `span` points, centred, so that the curve does not lag behind the data."""
    result = []
    for i, (x, _) in enumerate(points):
        reach = min(span // 2, i, len(points) - 1 - i)
        result.append((x, _mean([y for _, y in points[i - reach : i + reach + 1]])))
    return result


def _mean(values: Sequence[float]) -> float:
    """Return the mean of the finite values; NaN if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return round numbers (1, 2, 2.5 or 5 times a power of ten) from low to high."""
    raw = max((high - low) / about, LEAST) if high > low else 1.0
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def label(value: float) -> str:
    """Format an axis value: 1500 -> "1.5k", 0.0005 -> "5e-4"."""
    if value == 0:
        return "0"
    if abs(value) < 0.01:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    for size, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{suffix}"
    return f"{value:.4g}"


def tick(x: float, y: float, anchor: str, text: str) -> str:
    """Draw a small text; anchor: the end of it that is at x."""
    return f'<text class="tick" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


@attrs.frozen
class Axes:
    """Transformation from data to the drawing."""

    x: Point  # first and last step
    y: Point

    def across(self, x: float) -> float:
        low, high = self.x
        return LEFT + (x - low) / ((high - low) or 1) * (WIDTH - LEFT - RIGHT)

    def up(self, y: float) -> float:
        low, high = self.y
        return BASE - (y - low) / ((high - low) or 1) * (BASE - TOP)

    def grid(self) -> str:
        """Draw horizontal lines with their values, the steps below, and the axis titles."""
        parts = []
        for value in ticks(*self.y):
            y = self.up(value)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(tick(LEFT - 7, y + 4, "end", label(value)))
        for value in ticks(*self.x, about=5):
            if value == int(value):
                parts.append(tick(self.across(value), BASE + 17, "middle", label(value)))
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{BASE}" y2="{BASE}"/>')
        parts.append(tick((LEFT + WIDTH - RIGHT) / 2, BASE + 35, "middle", "step"))
        return "".join(parts)

    def path(self, points: Sequence[Point]) -> str:
        """Return the `d` of a line with gaps at non-finite values; a point between two gaps is a dot."""
        parts, pen_is_down = [], False
        for i, (x, y) in enumerate(points):
            if math.isfinite(y):
                place = f"{self.across(x):.1f} {self.up(y):.1f}"
                is_last = i + 1 == len(points) or not math.isfinite(points[i + 1][1])
                parts.append(f"L{place}" if pen_is_down else f"M{place}" + "h0" * is_last)
            pen_is_down = math.isfinite(y)
        return "".join(parts)


@attrs.frozen
class LegendKey:
    """One series for the legend and the hover script."""

    name: str
    colour: int
    points: Sequence[object]


def figure(
    title: str, unit: str, axes: Axes, body: str, keys: Sequence[LegendKey], *, legend: str = "", total: bool = False
) -> str:
    """Return a titled chart.  legend: HTML beside the series' names; total: show the sum of the series."""
    named = keys if len(keys) > 1 else ()  # the title names a single line
    names = "".join(f'<span class="key k{key.colour}">{html.escape(key.name)}</span>' for key in named)
    plot = {
        "x": axes.x,
        "box": [WIDTH, LEFT, RIGHT, TOP, BASE],
        "total": total,
        "series": [attrs.asdict(key) for key in keys],
    }
    heading = f"<b>{html.escape(title)}</b>" + (f" <i>{html.escape(unit)}</i>" if unit else "")
    return (
        f'<figure class="chart"><figcaption>{heading}<span class="legend">{names}{legend}</span></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)} by step">'
        f"{axes.grid()}{body}</svg>{embedded(plot)}</figure>"
    )


def embedded(data: Any) -> str:
    """Return JSON for embedding in a page, escaped so that it cannot end or open an element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json">{text}</script>'


def _hover_points(points: Sequence[Point]) -> list[tuple[float, float | None]]:
    """Return rounded JSON points, without NaN and infinity."""
    return [(round(x, 1), float(f"{y:.5g}") if math.isfinite(y) else None) for x, y in points]


def line_chart(
    title: str,
    unit: str,
    lines: Sequence[Line],
    *,
    marks: Mapping[str, float] | None = None,
    events: Sequence[float] = (),
    low: float = 0.0,
) -> str:
    """Draw all lines over one pair of axes; "" if there is nothing to draw.

    marks: dashed horizontal lines, by name; events: marked steps; low: start of the vertical axis, NaN for a little
    below the lowest point.
    """
    lines = [attrs.evolve(line, points=thin(line.points)) for line in lines if line.points]
    finite = [y for line in lines for _, y in line.points if math.isfinite(y)]
    if not finite:
        return ""
    steps = [x for line in lines for x, _ in line.points]
    axes = Axes((min(steps), max(steps)), _range(lines, finite, low))
    body, keys, colour = [_mark(axes, *mark) for mark in (marks or {}).items()], [], 0
    for line in lines:
        colour += not line.faint
        number = (colour + line.faint - 1) % NUM_COLOURS + 1  # a faint line has the colour of the next one
        body.append(f'<path class="{"faint" if line.faint else "line"} s{number}" d="{axes.path(line.points)}"/>')
        if not line.faint:
            keys.append(LegendKey(line.name, number, _hover_points(line.points)))
    marked = _events(axes, events)
    legend = '<span class="skips">skipped</span>' if marked else ""
    return figure(title, unit, axes, f'<g clip-path="url(#plot)">{"".join(body)}</g>{marked}', keys, legend=legend)


def _range(lines: Sequence[Line], finite: Sequence[float], low: float) -> Point:
    """Return the vertical range, with room above the highest solid point."""
    top = _ceiling(lines, finite)
    if not math.isnan(low):
        return low, top + 0.06 * abs(top - low) if top > low else low + 1.0
    bottom = min(finite)
    room = 0.06 * (top - bottom) or abs(top) * 0.1 or 1.0
    return bottom - room, top + room


def _ceiling(lines: Sequence[Line], finite: Sequence[float]) -> float:
    """Return the highest solid point: a spike of raw data behind a smoothed line may be clipped."""
    solid = [y for line in lines if not line.faint for _, y in line.points if math.isfinite(y)]
    return max(solid or finite)


def _mark(axes: Axes, name: str, value: float) -> str:
    """Draw a dashed horizontal line with its name above the right end."""
    y = axes.up(value)
    return f'<line class="mark" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>' + tick(
        WIDTH - RIGHT, y - 5, "end", name
    )


def _events(axes: Axes, steps: Sequence[float]) -> str:
    """Draw small triangles on the axis; many of them as one path."""
    inside = [axes.across(step) for step in steps if axes.x[0] <= step <= axes.x[1]]
    shapes = "".join(f"M{x:.1f} {BASE - 7}l4 7h-8Z" for x in inside)
    return f'<path class="event" d="{shapes}"><title>skipped steps</title></path>' if shapes else ""


def stacked_chart(title: str, unit: str, lines: Sequence[Line]) -> str:
    """Draw stacked values, the first at the bottom; "" if there is nothing to draw."""
    lines = [attrs.evolve(line, points=thin(line.points, MAX_AREA_POINTS)) for line in lines if line.points]
    if not lines:
        return ""
    steps = [x for x, _ in lines[0].points]
    floors = [0.0] * len(steps)
    layers = []
    for line in lines:
        tops = [floor + (y if math.isfinite(y) else 0.0) for floor, (_, y) in zip(floors, line.points)]
        layers.append((line, floors, tops))
        floors = tops
    axes = Axes((steps[0], steps[-1]), (0.0, sorted(floors)[int((len(floors) - 1) * 0.98)] * 1.1 or 1.0))
    body, keys = [], []
    for index, (line, low, high) in enumerate(layers):
        number = line.colour or index % NUM_COLOURS + 1
        forth = axes.path(list(zip(steps, high)))
        back = axes.path(list(zip(steps, low))[::-1]).replace("M", "L", 1)
        body.append(f'<path class="area f{number}" d="{forth}{back}Z"/>')
        keys.append(LegendKey(line.name, number, _hover_points(line.points)))
    return figure(title, unit, axes, f'<g clip-path="url(#plot)">{"".join(body)}</g>', keys, total=len(keys) > 1)
