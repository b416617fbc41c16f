"""Page of one run, or of several side by side.

One run: a summary and key figures, curves, then tables from computation to configuration.  Several: overlaid curves,
figures in columns, and the config values that differ.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from zengine.reporting import curves
from zengine.reporting.chart import Line, label, line_chart
from zengine.reporting.document import document, facts, section, shorten, table, tiles
from zengine.reporting.runs import RecordedRun, read_run
from zengine.reporting.tables import comms_section, config_sections, flops_section, skipped_section

__all__ = ["compare_page", "figures", "run_page", "write_report"]

PAGE, BESIDE = "report.html", "zengine-report.html"  # the second if another program's page has the first name
_RATES = {"tokens per second": curves.TOKENS, "samples per second": curves.SAMPLES, "ms per step": curves.STEP_MS}
_OURS = re.compile(rb"<title>[^<]*: run (report|comparison)</title>")
_HEAD_BYTES = 1 << 16  # of a page, in which the title is


def write_report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Read runs, write their page to `out` atomically, and return its path.

    out: defaults to the record folder of the first run, where only an earlier page of zengine is overwritten.

    Raises NoRunError if a folder holds no run, OSError if the page cannot be written.
    """
    runs = [read_run(folder) for folder in folders]
    out = out or default_place(runs[0].folder)
    text = run_page(runs[0]) if len(runs) == 1 else compare_page(runs)
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f"{out.name}.part")
    part.write_text(text, encoding="utf-8", errors="replace")
    part.replace(out)
    return out


def default_place(folder: Path) -> Path:
    """Return the default path of the page; another program's page of that name is not overwritten."""
    page = folder / PAGE
    if not page.exists():
        return page
    with page.open("rb") as file:
        return page if _OURS.search(file.read(_HEAD_BYTES)) else folder / BESIDE


def run_page(run: RecordedRun) -> str:
    """Return the page of one run."""
    drawn = "".join(curves.charts(run))
    environment = dict(run.environment) | ({"started": run.started} if run.started else {})
    traces = {name: "open in chrome://tracing or ui.perfetto.dev" for name in run.traces if name.startswith("trace")}
    sections = [
        f"<h1>{html.escape(run.name)}</h1><p class='lead'>{html.escape(summary(run))}</p>{tiles(figures(run))}"
        f"{median_note(run)}",
        remarks(run),
        f"<section class='charts'>{drawn}</section>" if drawn else "",
        skipped_section(run),
        flops_section(run),
        comms_section(run),
        section("Traces", facts(traces) if traces else "", note=f"In {run.folder / 'profile'}."),
        *config_sections(run),
        section("Environment", facts(environment) if environment else ""),
    ]
    return document(f"{run.name}: run report", sections)


def remarks(run: RecordedRun) -> str:
    """List missing and damaged files."""
    lines = "".join(f"<li>{html.escape(remark)}</li>" for remark in run.remarks)
    return f"<section class='card remarks'><h2>Missing data</h2><ul>{lines}</ul></section>" if lines else ""


def summary(run: RecordedRun) -> str:
    """Summarize the run in one or two sentences."""
    if not run.events:
        return "No step was recorded."
    steps, skipped = run.events[-1].step, len(curves.skipped_steps(run))
    loss = [value for _, value in run.points(*curves.LOSS)]
    text = f"{steps:,} {'step' if steps == 1 else 'steps'}, {_count(skipped)} skipped"
    if loss:
        text += f"; the loss went from {loss[0]:.4g} to {loss[-1]:.4g}"
    text += f", in {duration(run.seconds)} {'min' if run.seconds < 3600 else 'h'}." if run.seconds > 0 else "."
    if loss and not math.isfinite(loss[-1]):
        text += " The last loss is not finite."
    return text


def _count(number: int) -> str:
    return f"{number:,}" if number else "none"


def median_note(run: RecordedRun) -> str:
    """Return a note with the range of steps of the medians; "" if nothing was measured."""
    steps = [step for tags in _RATES.values() for step, value in run.points(*tags) if math.isfinite(value)]
    if not steps:
        return ""
    return f"<p class='note'>Medians are over the measured steps, {min(steps):,.0f} to {max(steps):,.0f}.</p>"


def figures(run: RecordedRun) -> dict[str, str]:
    """Return the key figures by name; unmeasured ones are absent."""
    found: dict[str, str] = {}
    if run.events:
        steps, skipped = run.events[-1].step, len(curves.skipped_steps(run))
        found["steps applied"] = f"{steps - skipped:,}"
        found["steps skipped"] = f"{skipped:,}"
    loss = run.points(*curves.LOSS)
    if loss:
        found["loss, last step"] = f"{loss[-1][1]:.4g}"
    medians = {name: curves.typical(run.points(*tags)) for name, tags in _RATES.items()}
    if math.isfinite(medians["tokens per second"]):
        del medians["samples per second"]
    finite = {name: value for name, value in medians.items() if math.isfinite(value)}
    found |= {f"{name}, median": label(float(f"{value:.3g}")) for name, value in finite.items()}
    compute = curves.typical(run.points(*curves.TFLOPS))
    if math.isfinite(compute):
        factor, unit = curves.flops_unit(compute)
        found[f"{unit} per device, median"] = f"{compute * factor:.3g}"
    utilisation, peak = curves.typical(run.points(*curves.MFU)), curves.peak_bytes(run)
    if math.isfinite(utilisation):
        found["of the device's peak (MFU), median"] = f"{utilisation:.1%}"
    if peak:
        factor, unit = curves.bytes_unit(peak)
        found["memory of rank 0, peak"] = f"{peak * factor:.3g} {unit}"
    return found


def duration(seconds: float) -> str:
    """Format seconds: 3:07, 2:03:07."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def compare_page(runs: Sequence[RecordedRun]) -> str:
    """Return the page of several overlaid runs."""
    names = number_names([run.name for run in runs])
    title = " / ".join(names)
    drawn = "".join(_overlays(dict(zip(names, runs))))
    sections = [
        f"<h1>{html.escape(title)}</h1><p class='lead'>{len(runs)} runs side by side.</p>",
        *(remarks(run) for run in runs),
        f"<section class='charts'>{drawn}</section>" if drawn else "",
        section("Figures", _columns(names, [figures(run) for run in runs])),
        section(
            "Config differences",
            _differences(names, [{row.key: row.value for row in run.plan} for run in runs]),
        ),
        section("Environment differences", _differences(names, [run.environment for run in runs])),
    ]
    return document(f"{title}: run comparison", sections)


def number_names(names: Sequence[str]) -> list[str]:
    """Number equal names."""
    return [f"{name} ({i + 1})" if names.count(name) > 1 else name for i, name in enumerate(names)]


def _overlays(runs: Mapping[str, RecordedRun]) -> list[str]:
    """Draw one chart per quantity, one line per run."""
    fastest = max((curves.peak_of(run.points(*curves.TFLOPS)) for run in runs.values()), default=0.0)
    factor, unit = curves.flops_unit(fastest)
    wanted = [
        ("Loss", "smoothed", curves.LOSS, 1.0, math.nan),
        ("Throughput", "tokens per second, all ranks, smoothed", curves.TOKENS, 1.0, 0.0),
        ("Step time", "ms, smoothed", curves.STEP_MS, 1.0, 0.0),
        ("Gradient norm", "before clipping, smoothed", curves.NORM, 1.0, 0.0),
        ("Compute", f"{unit} per device, smoothed", curves.TFLOPS, factor, 0.0),
    ]
    drawn = []
    for title, measure, tags, scale, low in wanted:
        series = {name: curves.scale_points(curves.smooth(run.points(*tags)), scale) for name, run in runs.items()}
        drawn.append(line_chart(title, measure, [Line(name, points) for name, points in series.items()], low=low))
    return drawn


def _columns(names: Sequence[str], values: Sequence[Mapping[str, str]]) -> str:
    """Return a row per value that any run has, a column per run; "" without rows."""
    keys = list(dict.fromkeys(key for each in values for key in each))
    rows = [("", [html.escape(key), *(shorten(each.get(key, "-")) for each in values)]) for key in keys]
    return table(["", *names], rows) if rows else ""


def _differences(names: Sequence[str], values: Sequence[Mapping[str, str]]) -> str:
    """Return the rows that differ between columns."""
    keys = dict.fromkeys(key for each in values for key in each)
    different = [key for key in keys if len({each.get(key, "-") for each in values}) > 1]
    return _columns(names, [{key: each.get(key, "-") for key in different} for each in values])
