"""The results of the convergence runs as text, markdown, JSON and SVG."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import attrs
from convergence_runs import REFERENCE, Run

__all__ = ["Outcome", "line", "markdown", "save", "svg", "text"]

HEAD = ["", "bytes/param", "held-out bits/byte", "minus reference", "last 20 steps", "seconds"]


@attrs.frozen(kw_only=True)
class Outcome:
    """The result of a run."""

    run: Run
    bits: float  # per byte of held-out text, at the end
    looks: tuple[tuple[int, float], ...]  # (step, bits per byte) on the way
    last_losses: float  # bits per byte of training text, mean of the last 20 steps
    bytes_per_param: float  # weights and state
    seconds: float


def difference(outcome: Outcome, outcomes: Sequence[Outcome]) -> float | None:
    """Difference to the reference with the same initial weights; None without one."""
    found = [other.bits for other in outcomes if (other.run.key, other.run.seed) == (REFERENCE, outcome.run.seed)]
    return outcome.bits - found[0] if found else None


def noise(outcomes: Sequence[Outcome]) -> float | None:
    """Spread of the reference over initial weights: largest minus smallest."""
    found = [o.bits for o in outcomes if o.run.key == REFERENCE]
    return max(found) - min(found) if len(found) > 1 else None


def means(outcomes: Sequence[Outcome]) -> list[tuple[str, float, float, int]]:
    """(title, mean difference, its standard error, seeds) of runs with several initial weights."""
    gaps: dict[str, list[float]] = {}
    for outcome in outcomes:
        gap = difference(outcome, outcomes)
        if gap is not None and outcome.run.key != REFERENCE:
            gaps.setdefault(outcome.run.title, []).append(gap)
    return [
        (title, statistics.mean(found), statistics.stdev(found) / len(found) ** 0.5, len(found))
        for title, found in gaps.items()
        if len(found) > 1
    ]


def cells(outcome: Outcome, outcomes: Sequence[Outcome]) -> list[str]:
    """A row of the table, without its name."""
    gap = difference(outcome, outcomes)
    return [
        f"{outcome.bytes_per_param:.2f}",
        f"{outcome.bits:.4f}",
        "" if gap is None else f"{gap:+.4f}",
        f"{outcome.last_losses:.4f}",
        f"{outcome.seconds:.0f}",
    ]


def line(outcome: Outcome, outcomes: Sequence[Outcome]) -> str:
    """One line, printed when a run ends."""
    return _name(outcome).ljust(52) + "".join(cell.rjust(12) for cell in cells(outcome, outcomes))


def _name(outcome: Outcome) -> str:
    return outcome.run.title + (f", seed {outcome.run.seed}" if outcome.run.seed else "")


def text(outcomes: Sequence[Outcome], facts: dict[str, Any]) -> str:
    """Text for a terminal."""
    lines = [f"{name}: {value}" for name, value in facts.items() if name in ("job", "text", "held out")]
    lines += [f"tables: {facts['bits per byte of tables']}", "", *(line(o, outcomes) for o in outcomes)]
    lines += ["", *(f"{t}: {mean:+.4f} +- {error:.4f} over {n} seeds" for t, mean, error, n in means(outcomes))]
    return "\n".join(lines)


def markdown(outcomes: Sequence[Outcome], facts: dict[str, Any]) -> str:
    """The whole report."""
    parts = ["# Convergence on the main job", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]
    parts += [
        "The same initial weights and the same windows in the same order; the network computes in float32.",
        "`bytes/param` counts weights and optimizer state.  Differences are to the reference with the same seed"
        + (
            f"; the reference differs by {limit:.4f} between seeds."
            if (limit := noise(outcomes)) is not None
            else "."
        ),
        "Rates other than AdamW's were tried at two or three values, not searched.",
        "",
        "| " + " | ".join(HEAD) + " |",
        "| --- |" + " ---: |" * (len(HEAD) - 1),
    ]
    parts += ["| " + " | ".join([_name(o), *cells(o, outcomes)]) + " |" for o in outcomes]
    if found := means(outcomes):
        parts += ["", "| | mean difference | standard error | seeds |", "| --- | ---: | ---: | ---: |"]
        parts += [f"| {title} | {mean:+.4f} | {error:.4f} | {n} |" for title, mean, error, n in found]
    return "\n".join([*parts, ""])


def save(folder: Path, name: str, outcomes: Sequence[Outcome], facts: dict[str, Any]) -> list[Path]:
    """Write NAME.json, NAME.md and NAME.svg into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    runs = [
        {
            "key": o.run.key,
            "title": o.run.title,
            "optimizer": o.run.optimizer,
            "options": o.run.options,
            "weights": str(o.run.weights).removeprefix("torch."),
            "seed": o.run.seed,
            **{field: getattr(o, field) for field in ("bits", "looks", "last_losses", "bytes_per_param", "seconds")},
        }
        for o in outcomes
    ]
    contents = {
        "json": json.dumps({"facts": facts, "runs": runs}, indent=1) + "\n",
        "md": markdown(outcomes, facts),
        "svg": svg(outcomes, f"Main job: {facts['job']}"),
    }
    for kind, content in contents.items():
        (folder / f"{name}.{kind}").write_text(content, encoding="utf-8")
    return [folder / f"{name}.{kind}" for kind in contents]


# The SVG: a bar for each run; left of the line is better than the reference --------------------------

LEFT, RIGHT, TOP, ROW, WIDTH = 340, 90, 64, 24, 900
CLIP = 0.2  # bits per byte at which a bar is cut off


def svg(outcomes: Sequence[Outcome], title: str) -> str:
    """Bars of differences to the reference, over the band between seeds."""
    gaps = [(o, difference(o, outcomes) or 0.0) for o in outcomes if o.run.key != REFERENCE]
    band = noise(outcomes) or 0.0
    reach = min(CLIP, max([1.1 * band, 0.01, *(1.1 * abs(gap) for _, gap in gaps)]))

    def x(gap: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (max(-reach, min(reach, gap)) + reach) / (2 * reach)

    bottom = TOP + ROW * len(gaps)
    parts = [_text(12, 22, title, 15), _text(12, 42, "held-out bits per byte minus AdamW fp32; left is better", 11)]
    parts.append(
        f'<rect x="{x(-band):.1f}" y="{TOP - 6}" width="{x(band) - x(-band):.1f}" height="{bottom - TOP + 6}" '
        'fill="#e9ecef"><title>spread of the reference over initial weights</title></rect>'
    )
    for row, (outcome, gap) in enumerate(gaps):
        y = TOP + ROW * row + ROW / 2
        left, right = sorted((x(0), x(gap)))
        length = max(1.5, right - left)
        colour = "#d6336c" if outcome.run.optimizer == "AdamW" else "#1c7ed6"
        parts += [
            _text(LEFT - 10, y + 4, f"{_name(outcome)} ({outcome.bytes_per_param:.1f} B)", 11, "end"),
            f'<rect x="{left:.1f}" y="{y - 7:.1f}" width="{length:.1f}" height="14" fill="{colour}"/>',
            _text(max(right, x(0)) + 6, y + 4, f"{gap:+.4f}", 11),
        ]
    parts.append(f'<line x1="{x(0):.1f}" x2="{x(0):.1f}" y1="{TOP - 6}" y2="{bottom}" stroke="#495057"/>')
    parts.append(
        _text(x(0), bottom + 18, f"grey: spread of the reference over initial weights (±{band:.4f})", 11, "middle")
    )
    height = bottom + 32
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="system-ui,sans-serif">'
    )
    return "\n".join([head, f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>', *parts, "</svg>", ""])


def _text(x: float, y: float, words: str, size: int, anchor: str = "start") -> str:
    style = f'font-size="{size}" text-anchor="{anchor}" fill="#212529"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'
