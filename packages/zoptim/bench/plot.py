"""The report as SVG: a line for every table, a dot for every contender, time over the floor on the x axis.

Written without a plotting library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from report import FLOOR, Table, short

__all__ = ["svg"]

LEFT, RIGHT, TOP, ROW, WIDTH = 300, 30, 80, 22, 1000
COLOURS = {
    "ours": "#d6336c",
    "ours fp32": "#f0a5c0",
    "ours, CUDA graph": "#862e56",
    "torch fused": "#1c7ed6",
    "torch foreach": "#4dabf7",
    "torch foreach, by hand": "#4dabf7",
    "torch for": "#a5d8ff",
    "DeepSpeed": "#f08c00",
    "numpy": "#868e96",
}
MARKS = (1, 1.5, 2, 3, 5, 10, 20, 50, 100)


def svg(tables: Sequence[Table], title: str) -> str:
    """A logarithmic dot plot of the tables that have a floor."""
    shown = [table for table in tables if FLOOR in table.samples]
    ratios = [table.ratio(name) or 1.0 for table in shown for name in table.samples]
    low, high = min([0.9, *ratios]), max([2.0, *ratios]) * 1.1
    height = TOP + ROW * len(shown) + 40

    def x(ratio: float) -> float:
        share = math.log(ratio / low) / math.log(high / low)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    parts = [_text(12, 22, title, 15), *_legend(shown)]
    bottom = TOP + ROW * len(shown)
    for mark in (mark for mark in MARKS if low <= mark <= high):
        strong = "#495057" if mark == 1 else "#dee2e6"
        parts.append(f'<line x1="{x(mark):.1f}" x2="{x(mark):.1f}" y1="{TOP - 6}" y2="{bottom}" stroke="{strong}"/>')
        parts.append(_text(x(mark), bottom + 16, f"{mark:g}x", 11, "middle"))
    parts.append(
        _text((LEFT + WIDTH) / 2, bottom + 32, "time over the floor (log scale; left is faster)", 11, "middle")
    )
    for number, table in enumerate(shown):
        parts += _line(table, TOP + ROW * number + ROW / 2, x)
    style = "font-family:system-ui,sans-serif;background:#fff"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" style="{style}">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>', *parts, "</svg>", ""])


def _line(table: Table, y: float, x: Callable[[float], float]) -> list[str]:
    tensors = "flat" if table.num_tensors == 1 else f"{table.num_tensors} tensors"
    parts = [_text(LEFT - 12, y + 4, f"{table.case.name}, {short(table.total)}, {tensors}", 11, "end")]
    for name in reversed(list(table.samples)):  # draws ours, near the front of the table, on top
        ratio = table.ratio(name)
        if name != FLOOR and ratio is not None:
            label = f"<title>{escape(name)}: {ratio:.2f}x</title>"
            place = f'cx="{x(ratio):.1f}" cy="{y:.1f}" r="{6 if name == "ours" else 4.5}"'
            parts.append(f'<circle {place} fill="{_colour(name)}">{label}</circle>')
    return parts


def _legend(tables: Sequence[Table]) -> list[str]:
    names = dict.fromkeys(_family(name) for table in tables for name in table.samples if name != FLOOR)
    parts, x = [], 14
    for name in names:
        parts += [f'<circle cx="{x}" cy="46" r="5" fill="{_colour(name)}"/>', _text(x + 9, 50, name, 11)]
        x += 30 + 7 * len(name)
    return parts


def _family(name: str) -> str:
    return "DeepSpeed" if name.startswith("DeepSpeed") else name.replace(", by hand", "")


def _colour(name: str) -> str:
    return COLOURS.get(_family(name), "#37b24d")


def _text(x: float, y: float, words: str, size: int, anchor: str = "start") -> str:
    style = f'font-size="{size}" text-anchor="{anchor}" fill="#212529"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'
