"""report.html: what happened in a run, as one file that opens anywhere and can be mailed.

Loss and speed come from the journal, times and memory from the record that the engine kept (`zengine report` makes a
page of that alone).  What this page adds is what a byte model can be asked: whether it beats the byte tables, and
what it writes.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import attrs

from zengine.reporting import RecordedRun
from zengine.reporting.chart import Line, line_chart, moving_average, stacked_chart
from zengine.reporting.curves import memory_charts, time_layers
from zengine.reporting.document import bar, details, document, facts, section
from zengine.reporting.document import tiles as as_tiles

from .evaluate import LN2, Result
from .journal import Row
from .progress import amount, duration
from .recipe import Recipe

Facts = Mapping[str, object]  # one table: what is named, and its value
Points = list[tuple[float, float]]


@attrs.frozen(kw_only=True)
class Story:
    """Everything that the page tells."""

    name: str
    recipe: Recipe
    rows: list[Row]  # of the journal
    record: RecordedRun  # what the engine left
    result: Result
    sample: str  # generated text
    environment: Facts
    corpus: Facts


def charts(story: Story) -> Iterable[str]:
    steps = [row for row in story.rows if "loss" in row]
    looks = [row for row in story.rows if "validation" in row]

    def series(key: str, factor: float = 1.0) -> Points:
        return [(row["step"], row[key] * factor) for row in steps]

    span = max(1, len(steps) // 40)
    loss = series("loss", 1 / LN2)
    held_out = [(row["step"], row["validation"] / LN2) for row in looks]
    yield line_chart(
        "Loss",
        "bits per byte",
        [
            Line("each batch", loss, faint=True),
            Line("training", moving_average(loss, span)),
            Line("held-out", held_out),
        ],
        marks={"unigram": story.result.unigram, "bigram": story.result.bigram},
    )
    speed = series("bytes_per_s")
    yield line_chart(
        "Throughput",
        "tokens per second, all ranks",
        [Line("each step", speed, faint=True), Line("smoothed", moving_average(speed, span))],
    )
    yield stacked_chart("Where a step's time goes", "ms, rank 0", time_layers(story.record))
    yield line_chart("Learning rate", "", [Line("learning rate", series("lr"))])
    norm = series("grad_norm")
    yield line_chart(
        "Gradient norm",
        "before clipping",
        [Line("each step", norm, faint=True), Line("smoothed", moving_average(norm, span))],
    )
    yield from memory_charts(story.record)


def contest(result: Result) -> str:
    """The three contestants as horizontal bars."""
    contestants = {"byte frequencies": result.unigram, "byte pairs": result.bigram, "the model": result.model}
    longest = max(contestants.values())
    rows = []
    for name, bits in contestants.items():
        colour = 1 if name == "the model" else 8
        rows.append(
            f"<tr><th>{name}</th><td class='number'>{bits:.3f}</td><td>{bar(bits / longest, colour)}</td></tr>"
        )
    return f"<table class='bars'>{''.join(rows)}</table>"


def tiles(story: Story) -> str:
    """The four figures to take home."""
    steps = [row for row in story.rows if "loss" in row]
    seconds = sum(row["ms"] for row in steps) / 1e3
    total_bytes = sum(row["bytes_per_s"] * row["ms"] / 1e3 for row in steps)
    gain = 1 - story.result.model / story.result.bigram
    figures = {
        "bits per byte, held out": f"{story.result.model:.3f}",
        f"{'better' if gain >= 0 else 'worse'} than byte pairs by": f"{abs(gain):.0%}",
        "tokens per second, mean of all steps": amount(total_bytes / seconds) if seconds else "-",
        "training time": duration(seconds),
    }
    return as_tiles(figures)


def run_facts(story: Story) -> Facts:
    recipe, steps = story.recipe, [row for row in story.rows if "loss" in row]
    skipped = [row["step"] for row in steps if row["skipped"]]
    return {
        "steps": f"{story.result.step} of {recipe.steps}",
        "skipped steps": ", ".join(map(str, skipped)) or "none",
        "model": f"{recipe.shape.depth} blocks, width {recipe.shape.width}, {recipe.shape.heads} heads",
        "context": f"{recipe.shape.context} bytes",
        "final loss (nats per byte)": f"{steps[-1]['loss']:.4f} in training, {story.result.model * LN2:.4f} held out",
        "seed": recipe.seed,
    }


def page(story: Story) -> str:
    """The whole file."""
    verdict = "beats" if story.result.wins else "does not beat"
    perplexity = math.exp(story.result.model * LN2)
    sections = [
        f"<h1>{html.escape(story.name)}</h1>"
        f"<p class='lead'>A byte-level GPT trained on the Python standard library. On {story.result.guesses:,} bytes "
        f"of files it never saw it needs {story.result.model:.3f} bits per byte, as if choosing among "
        f"{perplexity:.1f} equally likely bytes; it {verdict} the table of byte pairs.</p>"
        f"{tiles(story)}",
        f"<section class='charts'>{''.join(charts(story))}</section>",
        section("Held-out text, bits per byte", contest(story.result)),
        section("What it writes", f"<pre>{html.escape(story.sample)}</pre>"),
        f"<section class='columns'><div><h2>Run</h2>{facts(run_facts(story))}</div>"
        f"<div><h2>Environment</h2>{facts(story.environment)}</div>"
        f"<div><h2>Text</h2>{facts(story.corpus)}</div></section>",
        details(
            "Configuration, as handed to zengine.initialize",
            f"<pre>{html.escape(json.dumps(story.recipe.config, indent=2))}</pre>",
        ),
    ]
    return document(f"{story.name}: training report", sections)


def write_report(story: Story, path: Path) -> None:
    path.write_text(page(story), encoding="utf-8")
