"""Which curves a run has: from its events to charts.

Tags are looked up by our names and by DeepSpeed's, so that any events of either kind draw; the loss by DeepSpeed's
first, which is that of each step, where ours is a mean of several.  What was not recorded has no chart.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

from zengine.reporting.chart import Line, line_chart, smoothed, stacked_chart, thinned
from zengine.reporting.runs import Points, Run

__all__ = ["charts", "memory_owners", "peak_bytes", "skipped_steps", "smooth", "step_parts", "time_layers", "typical"]

LOSS = ("Train/Samples/train_loss", "train/loss")
RATE = ("train/learning_rate", "Train/Samples/lr")
NORM = ("train/grad_norm", "Train/Samples/grad_norm")
SCALE = ("train/loss_scale", "Train/Samples/loss_scale")
SKIPPED = ("train/skipped_steps", "Train/Samples/skipped_steps")
TOKENS = ("perf/tokens_per_second",)
SAMPLES = ("perf/samples_per_second", "Throughput/samples_per_s")
STEP_MS = ("perf/step_time_ms", "Throughput/step_ms")
TFLOPS = ("perf/tflops", "perf/tflops_counted")
MFU = ("perf/mfu",)
TIMER = "Train/Samples/elapsed_time_ms_"
# One for each part of a step, so that pages can be held side by side.
PHASE_COLOURS = {
    "data": 7,
    "forward": 1,
    "backward": 2,
    "communication": 3,
    "step": 4,
    "checkpoint": 5,
    "other": 8,
}
MEMORY = ("memory/", "Memory/")
# Memory that is a whole, of which the owners are parts, or a moment: never stacked.
WHOLES = {
    "process": "resident",
    "process_peak": "resident, peak",
    "cuda": "allocated",
    "cuda_peak": "allocated, peak",
}
RESERVED = "cuda_reserved"


def charts(run: Run) -> Iterator[str]:
    """All that the run has, the most asked for first; "" for those it has not."""
    skipped = skipped_steps(run)
    yield curve("Loss", "mean over ranks", run.points(*LOSS), skipped, low=math.nan)
    tokens, samples = run.points(*TOKENS), run.points(*SAMPLES)
    yield curve("Throughput", "tokens per second, all ranks", tokens) or curve(
        "Throughput", "samples per second, all ranks", samples
    )
    yield stacked_chart("Where a step's time goes", "ms, rank 0", time_layers(run))
    yield curve("Gradient norm", "before clipping", run.points(*NORM), skipped)
    yield line_chart("Learning rate", "first group", [Line("learning rate", run.points(*RATE))], events=skipped)
    yield from memory_charts(run)
    rate = smooth(run.points(*TFLOPS))
    factor, unit = flops_unit(peak_of(rate))
    yield line_chart("Compute", f"{unit} per device, smoothed", [Line(unit, scaled(rate, factor))])
    yield line_chart(
        "Model FLOPs utilisation", "% of peak, smoothed", [Line("MFU", scaled(smooth(run.points(*MFU)), 100))]
    )
    scale = run.points(*SCALE)
    if len({value for _, value in scale}) > 1:
        yield line_chart("Loss scale", "log2", [Line("scale", log2(scale))], events=skipped, low=math.nan)


def curve(title: str, unit: str, points: Points, events: Sequence[float] = (), *, low: float = 0.0) -> str:
    """A series with its smoothed line before it."""
    lines = [Line("each step", points, faint=True), Line("smoothed", smooth(points))]
    return line_chart(title, unit, lines, events=events, low=low)


def smooth(points: Points) -> Points:
    """Means over a fortieth of the run, of which a long one is thinned first."""
    few = thinned(points, 2000)
    return smoothed(few, max(1, len(few) // 40))


def scaled(points: Points, factor: float) -> Points:
    return [(step, value * factor) for step, value in points]


def log2(points: Points) -> Points:
    """Logarithms; what has none is a gap."""
    return [(step, math.log2(value) if 0 < value < math.inf else math.nan) for step, value in points]


def typical(points: Points) -> float:
    """The median of what is finite; NaN if nothing is."""
    finite = [value for _, value in points if math.isfinite(value)]
    return statistics.median(finite) if finite else math.nan


def skipped_steps(run: Run) -> list[float]:
    """Steps whose update was left out: where the counter of the skipped ones rises."""
    found, before = [], 0.0
    for index, (step, count) in enumerate(run.points(*SKIPPED)):
        if count > before and (index or step == 1):  # the counter of a run that was resumed elsewhere is no step
            found.append(step)
        before = count
    return found


def time_layers(run: Run) -> list[Line]:
    """A step's time in parts that do not contain each other, each averaged over a few steps; [] without timers."""
    tags = [tag for tag in run.tags(TIMER) if not tag.endswith("_microstep")]
    timers = {tag.removeprefix(TIMER): dict(run.points(tag)) for tag in tags}
    if "forward" not in timers:
        return []
    steps = sorted(timers["forward"])
    whole = dict(run.points(*STEP_MS))
    layers: dict[str, list[float]] = {}
    for step in steps:
        parts = step_parts({name: series.get(step, 0.0) for name, series in timers.items()}, whole.get(step, 0.0))
        for name, ms in parts.items():
            layers.setdefault(name, []).append(ms)
    span = max(1, min(len(steps), 2000) // 60)
    series = {name: smoothed(thinned(list(zip(steps, ms)), 2000), span) for name, ms in layers.items() if any(ms)}
    return [Line(name, points, colour=PHASE_COLOURS[name]) for name, points in series.items()]


def step_parts(timers: Mapping[str, float], whole: float) -> dict[str, float]:
    """Milliseconds of one step: the phases without what they contain, and what no timer saw.

    Waiting for collectives is told for backward, where it is measured apart; the forward and the update hold theirs.
    Saving is not part of the step's time and comes on top.
    """
    backward = timers.get("backward", 0.0)
    inner = timers.get("backward_inner", max(0.0, backward - timers.get("backward_allreduce", 0.0)))
    parts = {
        "data": timers.get("data", 0.0),
        "forward": timers.get("forward", 0.0),
        "backward": min(inner, backward),
        "communication": max(0.0, backward - inner),
        "step": timers.get("step", 0.0),
    }
    return {**parts, "checkpoint": timers.get("checkpoint", 0.0), "other": max(0.0, whole - sum(parts.values()))}


def memory_charts(run: Run) -> Iterator[str]:
    """Bytes by owner, stacked, and the totals of process and allocator."""
    owners = memory_owners(run)
    factor, unit = bytes_unit(sum(map(peak_of, owners.values())))
    yield stacked_chart(
        "Memory by owner", f"{unit}, rank 0", [Line(name, scaled(each, factor)) for name, each in owners.items()]
    )
    wholes = {name: memory_points(run, word) for word, name in WHOLES.items()}
    factor, unit = bytes_unit(max((peak_of(points) for points in wholes.values()), default=0.0))
    lines = [Line(name, scaled(points, factor)) for name, points in wholes.items() if points]
    yield line_chart("Memory in all", f"{unit}, rank 0", lines)


def memory_owners(run: Run) -> dict[str, Points]:
    """Bytes of each owner over all steps that know of any, those that never hold anything left out.

    On CUDA what the allocator holds beyond the owners (activations, workspaces) is an owner too.
    """
    found: dict[str, dict[float, float]] = {}
    for prefix in MEMORY:
        for tag in run.tags(prefix):
            name = tag.removeprefix(prefix).removesuffix("_bytes")
            if name not in WHOLES and name != RESERVED and not name.startswith("after_"):
                found[name.replace("_", " ")] = dict(run.points(tag))
    if not found:
        return {}
    first = min(step for series in found.values() for step in series)
    steps = [float(event.step) for event in run.events if event.step >= first]
    owners = {name: _held(series, steps) for name, series in found.items()}
    on_device = dict(memory_points(run, "cuda"))
    if on_device:
        sums = [sum(values) for values in zip(*([value for _, value in points] for points in owners.values()))]
        rest = {step: max(0.0, on_device[step] - held) for step, held in zip(steps, sums) if step in on_device}
        owners["activations and others"] = _held(rest, steps)
    return {name: points for name, points in owners.items() if any(value > 0 for _, value in points)}


def _held(series: Mapping[float, float], steps: Sequence[float]) -> Points:
    """A value at every step: the last one known, since owners are looked at only when something may have changed."""
    points, known = [], 0.0
    for step in steps:
        known = series.get(step, known)
        points.append((step, known))
    return points


def memory_points(run: Run, word: str) -> Points:
    return run.points(*(f"{prefix}{word}_bytes" for prefix in MEMORY))


def peak_bytes(run: Run) -> float:
    """The most that was in use: on the device if there is one, else of the process; 0 where nobody looked."""
    for words in (("cuda_peak", "cuda"), ("process_peak", "process")):
        peak = max((peak_of(memory_points(run, word)) for word in words), default=0.0)
        if peak:
            return peak
    return 0.0


def peak_of(points: Iterable[tuple[float, float]]) -> float:
    return max((value for _, value in points if math.isfinite(value)), default=0.0)


def flops_unit(most: float) -> tuple[float, str]:
    """The factor on TFLOPS and the unit that make `most` TFLOPS readable."""
    units = ((1e3, "PFLOPS"), (1.0, "TFLOPS"), (1e-3, "GFLOPS"))
    return next(((1 / size, unit) for size, unit in units if most >= size), (1e6, "MFLOPS"))


def bytes_unit(most: float) -> tuple[float, str]:
    """The factor and the unit that make `most` readable."""
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if most >= size:
            return 1 / size, unit
    return 1.0, "bytes"
