"""report.html: the report of a run, in one file without references to others.

Loss and speed come from the journal, times and memory from the engine's record (`zengine report` shows that alone).
This page adds the comparison with the byte tables and a sample of generated text.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import attrs

from zengine.inference.quality_page import error_chart
from zengine.reporting import RecordedRun
from zengine.reporting.chart import Line, line_chart, moving_average, stacked_chart
from zengine.reporting.curves import memory_charts, time_layers
from zengine.reporting.document import bar, details, document, facts, section, table
from zengine.reporting.document import tiles as as_tiles

from .evaluate import LN2, Result
from .inference import SAMPLED_BY, Inference
from .journal import Row
from .progress import amount, duration
from .recipe import Recipe

Facts = Mapping[str, object]  # rows of one table: name and value
Points = list[tuple[float, float]]


@attrs.frozen(kw_only=True)
class ReportData:
    """Contents of the page."""

    name: str
    recipe: Recipe
    rows: list[Row]  # of the journal
    record: RecordedRun  # the engine's record
    result: Result
    inference: Inference
    environment: Facts
    corpus: Facts


def charts(data: ReportData) -> Iterable[str]:
    steps = [row for row in data.rows if "loss" in row]
    validations = [row for row in data.rows if "validation" in row]

    def series(key: str, factor: float = 1.0) -> Points:
        return [(row["step"], row[key] * factor) for row in steps]

    span = max(1, len(steps) // 40)
    loss = series("loss", 1 / LN2)
    held_out = [(row["step"], row["validation"] / LN2) for row in validations]
    yield line_chart(
        "Loss",
        "bits per byte",
        [
            Line("each batch", loss, faint=True),
            Line("training, moving mean", moving_average(loss, span)),
            Line("held-out", held_out),
        ],
        marks={"unigram": data.result.unigram, "bigram": data.result.bigram},
    )
    speed = series("bytes_per_s")
    yield line_chart(
        "Throughput",
        "tokens per second, all ranks",
        [Line("each step", speed, faint=True), Line("moving mean", moving_average(speed, span))],
    )
    yield stacked_chart("Where a step's time goes", "ms, rank 0", time_layers(data.record))
    yield line_chart("Learning rate", "", [Line("learning rate", series("lr"))])
    norm = series("grad_norm")
    yield line_chart(
        "Gradient norm",
        "before clipping",
        [Line("each step", norm, faint=True), Line("moving mean", moving_average(norm, span))],
    )
    yield from memory_charts(data.record)


def baseline_bars(result: Result) -> str:
    """Render the model and both baselines as horizontal bars."""
    figures = {"byte frequencies": result.unigram, "byte pairs": result.bigram, "the model": result.model}
    longest = max(figures.values())
    rows = []
    for name, bits in figures.items():
        colour = 1 if name == "the model" else 8
        rows.append(
            f"<tr><th>{name}</th><td class='number'>{bits:.3f}</td><td>{bar(bits / longest, colour)}</td></tr>"
        )
    return f"<table class='bars'>{''.join(rows)}</table>"


def inference_sections(inference: Inference) -> Iterable[str]:
    """Render a table of the formats with their speeds as bars, and the error of each layer in int4."""
    if not inference.variants or inference.report is None:
        return
    fastest = max(each.tokens_per_s for each in inference.variants)
    header = (
        "weights",
        "MB",
        "bits per byte",
        "change",
        "same likeliest",
        "KL, nats",
        "8-bit layers",
        "tokens/s",
        "",
    )
    rows = [
        (
            "",
            [
                *(each.name, f"{each.nbytes / 1e6:.2f}", f"{each.bits_per_byte:.4f}", f"{each.change:+.2%}"),
                *(f"{each.top_1:.2%}", f"{each.kl_mean:.1e}", f"{each.kept_share:.0%}", f"{each.tokens_per_s:,.0f}"),
                bar(each.tokens_per_s / fastest),
            ],
        )
        for each in inference.variants
    ]
    note = f"On {inference.num_bytes:,} held-out bytes; one sequence at a time. The text below is by {SAMPLED_BY}."
    yield section("Inference with quantized weights", table(header, rows), note=note)
    yield section(
        "Error of the layers in int4",
        error_chart(inference.report),
        note="Root mean square of the rounding, over that of the weights. Layers in the order of the model.",
    )


def tiles(data: ReportData) -> str:
    """Render the four main figures."""
    steps = [row for row in data.rows if "loss" in row]
    seconds = sum(row["ms"] for row in steps) / 1e3
    total_bytes = sum(row["bytes_per_s"] * row["ms"] / 1e3 for row in steps)
    gain = 1 - data.result.model / data.result.bigram
    figures = {
        "bits per byte, held out": f"{data.result.model:.3f}",
        f"{'better' if gain >= 0 else 'worse'} than byte pairs by": f"{abs(gain):.0%}",
        "tokens per second, mean of all steps": amount(total_bytes / seconds) if seconds else "-",
        "training time": duration(seconds),
    }
    return as_tiles(figures)


def run_facts(data: ReportData) -> Facts:
    recipe, steps = data.recipe, [row for row in data.rows if "loss" in row]
    skipped = [row["step"] for row in steps if row["skipped"]]
    return {
        "steps": f"{data.result.step} of {recipe.steps}",
        "skipped steps": ", ".join(map(str, skipped)) or "none",
        "model": f"{recipe.shape.depth} blocks, width {recipe.shape.width}, {recipe.shape.heads} heads",
        "context": f"{recipe.shape.context} bytes",
        "final loss (nats per byte)": f"{steps[-1]['loss']:.4f} in training, {data.result.model * LN2:.4f} held out",
        "seed": recipe.seed,
    }


def page(data: ReportData) -> str:
    """Render the whole file."""
    verdict = "beats" if data.result.beats_baseline else "does not beat"
    perplexity = math.exp(data.result.model * LN2)
    sections = [
        f"<h1>{html.escape(data.name)}</h1>"
        f"<p class='lead'>A byte-level GPT trained on the Python standard library. On {data.result.guesses:,} bytes "
        f"of held-out files it needs {data.result.model:.3f} bits per byte, as if choosing among "
        f"{perplexity:.1f} equally likely bytes; it {verdict} the table of byte pairs.</p>"
        f"{tiles(data)}",
        f"<section class='charts'>{''.join(charts(data))}</section>",
        section("Held-out text, bits per byte", baseline_bars(data.result)),
        *inference_sections(data.inference),
        section("Generated text", f"<pre>{html.escape(data.inference.sample)}</pre>"),
        f"<section class='columns'><div><h2>Run</h2>{facts(run_facts(data))}</div>"
        f"<div><h2>Environment</h2>{facts(data.environment)}</div>"
        f"<div><h2>Text</h2>{facts(data.corpus)}</div></section>",
        details(
            "Configuration, as passed to zengine.initialize",
            f"<pre>{html.escape(json.dumps(data.recipe.config, indent=2))}</pre>",
        ),
    ]
    return document(f"{data.name}: training report", sections)


def write_report(data: ReportData, path: Path) -> None:
    path.write_text(page(data), encoding="utf-8")
