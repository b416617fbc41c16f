"""Charts as SVG text: a page that needs no script library, no network and no image files.

Two kinds, both over the step number: lines, and areas stacked on each other.  Colours are CSS variables of the page
(`--series-1` ...), so one drawing serves a light and a dark page.  Every chart carries its points as JSON for the
page's small hover script; without scripts it is complete as drawn.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence

import attrs

WIDTH, HEIGHT = 560, 250  # of the drawing, in user units; it scales with the page
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 28  # margins around the plot
MAX_POINTS = 400  # of a line: more cannot be told apart
# Once in a page: what a plot's lines are cut off at.
CLIP = (
    '<svg width="0" height="0" style="position:absolute"><clipPath id="plot">'
    f'<rect x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" height="{HEIGHT - TOP - BOTTOM}"/></clipPath></svg>'
)


@attrs.frozen
class Line:
    """One series.  Points that are not finite leave a gap."""

    name: str
    points: Sequence[tuple[float, float]]  # (step, value), by step
    faint: bool = False  # drawn thin and pale: raw data behind its smoothed line


def thinned(points: Sequence[tuple[float, float]], at_most: int = MAX_POINTS) -> list[tuple[float, float]]:
    """Means of neighbours, so that a long run draws as fast as a short one."""
    group = math.ceil(len(points) / at_most) or 1
    groups = [points[i : i + group] for i in range(0, len(points), group)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


def smoothed(points: Sequence[tuple[float, float]], span: int) -> list[tuple[float, float]]:
    """Means over about `span` points, as many before as after, so that the curve does not lag behind the data."""
    result = []
    for i, (x, _) in enumerate(points):
        reach = min(span // 2, i, len(points) - 1 - i)
        near = [y for _, y in points[i - reach : i + reach + 1] if math.isfinite(y)]
        result.append((x, sum(near) / len(near) if near else math.nan))
    return result


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers (1, 2, 2.5 or 5 times a power of ten) from low to high."""
    raw = (high - low) / about or 1.0
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def label(value: float) -> str:
    """1500 -> "1.5k", 0.0005 -> "5e-4"."""
    if value == 0:
        return "0"
    if abs(value) < 0.01:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{suffix}"
    return f"{value:.4g}"


def tick(x: float, y: float, anchor: str, text: str) -> str:
    """A small text of the drawing; anchor: which end of it is at x."""
    return f'<text class="tick" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


@attrs.frozen
class Axes:
    """From data to the drawing."""

    x: tuple[float, float]  # first and last step
    y: tuple[float, float]

    def across(self, x: float) -> float:
        low, high = self.x
        return LEFT + (x - low) / ((high - low) or 1) * (WIDTH - LEFT - RIGHT)

    def up(self, y: float) -> float:
        low, high = self.y
        return HEIGHT - BOTTOM - (y - low) / ((high - low) or 1) * (HEIGHT - TOP - BOTTOM)

    def grid(self) -> str:
        """Horizontal lines with their values, and the steps below."""
        parts = []
        for value in ticks(*self.y):
            y = self.up(value)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(tick(LEFT - 7, y + 3.5, "end", label(value)))
        for value in ticks(*self.x, about=6):
            parts.append(tick(self.across(value), HEIGHT - BOTTOM + 17, "middle", label(value)))
        base = HEIGHT - BOTTOM
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
        return "".join(parts)

    def path(self, points: Sequence[tuple[float, float]]) -> str:
        """The `d` of a line, interrupted where a value is not finite."""
        parts, pen_is_down = [], False
        for x, y in points:
            if math.isfinite(y):
                parts.append(f"{'L' if pen_is_down else 'M'}{self.across(x):.1f} {self.up(y):.1f}")
            pen_is_down = math.isfinite(y)
        return "".join(parts)


def figure(title: str, unit: str, axes: Axes, body: str, series: Sequence[tuple[str, int, Sequence[object]]]) -> str:
    """A titled chart with its legend.  series: name, colour number, points for the hover script."""
    named = series if len(series) > 1 else ()  # a single line is what the title says
    keys = "".join(f'<span class="key k{colour}">{html.escape(name)}</span>' for name, colour, _ in named)
    data = {"x": axes.x, "series": [{"name": n, "colour": c, "points": p} for n, c, p in series]}
    plot = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    return (
        f'<figure class="chart"><figcaption><b>{html.escape(title)}</b> <i>{html.escape(unit)}</i>'
        f'<span class="legend">{keys}</span></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)} by step">'
        f"{axes.grid()}{body}</svg>"
        f'<script type="application/json">{plot}</script></figure>'
    )


def _hover_points(points: Sequence[tuple[float, float]]) -> list[tuple[float, float | None]]:
    """Rounded, as JSON has it: no NaN, no infinity."""
    return [(round(x, 1), float(f"{y:.5g}") if math.isfinite(y) else None) for x, y in points]


def line_chart(title: str, unit: str, lines: Sequence[Line], *, marks: Mapping[str, float] | None = None) -> str:
    """All lines over one pair of axes that begin at zero, and dashed `marks`; "" if there is nothing to draw."""
    lines = [attrs.evolve(line, points=thinned(line.points)) for line in lines if line.points]
    finite = [y for line in lines for _, y in line.points if math.isfinite(y)]
    if not finite:
        return ""
    steps = [x for line in lines for x, _ in line.points]
    axes = Axes((min(steps), max(steps)), (0.0, _ceiling(lines, finite) * 1.06))
    body, legend, colour = [_mark(axes, *mark) for mark in (marks or {}).items()], [], 0
    for line in lines:
        colour += not line.faint
        number = colour + line.faint  # a faint line wears the colour of the one after it
        kind = "faint" if line.faint else "line"
        body.append(f'<path class="{kind} s{number}" d="{axes.path(line.points)}"/>')
        if not line.faint:
            legend.append((line.name, number, _hover_points(line.points)))
    return figure(title, unit, axes, f'<g clip-path="url(#plot)">{"".join(body)}</g>', legend)


def _mark(axes: Axes, name: str, value: float) -> str:
    """A dashed line across the plot, with its name above its right end."""
    y = axes.up(value)
    return f'<line class="mark" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>' + tick(
        WIDTH - RIGHT, y - 5, "end", name
    )


def _ceiling(lines: Sequence[Line], finite: Sequence[float]) -> float:
    """The highest solid point: a spike of raw data behind a smoothed line may leave the picture."""
    solid = [y for line in lines if not line.faint for _, y in line.points if math.isfinite(y)]
    return max(solid or finite) or 1.0


def stacked_chart(title: str, unit: str, lines: Sequence[Line]) -> str:
    """Values of equal steps added up, the first at the bottom; "" if there is nothing to draw."""
    lines = [attrs.evolve(line, points=thinned(line.points, 150)) for line in lines if line.points]
    if not lines:
        return ""
    steps = [x for x, _ in lines[0].points]
    floors = [0.0] * len(steps)
    layers = []
    for line in lines:
        tops = [floor + y for floor, (_, y) in zip(floors, line.points)]
        layers.append((line, floors, tops))
        floors = tops
    axes = Axes((steps[0], steps[-1]), (0.0, sorted(floors)[int(len(floors) * 0.98) - 1] * 1.1 or 1.0))
    body, legend = [], []
    for number, (line, low, high) in enumerate(layers, 1):
        forth = axes.path(list(zip(steps, high)))
        back = axes.path(list(zip(steps, low))[::-1]).replace("M", "L", 1)
        body.append(f'<path class="area f{number}" d="{forth}{back}Z"/>')
        legend.append((line.name, number, _hover_points(line.points)))
    return figure(title, unit, axes, f'<g clip-path="url(#plot)">{"".join(body)}</g>', legend)
