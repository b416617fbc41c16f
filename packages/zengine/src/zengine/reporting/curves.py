"""Curves of a run: from its events to charts.

Tags of ours and of DeepSpeed are looked up, so that events of either kind draw; DeepSpeed's loss comes first, which
is that of each step, where ours is a mean of several.  Values that were not recorded have no chart.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

from zengine.reporting.chart import Line, line_chart, moving_average, stacked_chart, thin
from zengine.reporting.runs import Points, RecordedRun

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
ROLLOUT = "rollout/"  # tags of rollouts: the engine's, and those that the program writes beside them
ROLLOUT_UNITS = {
    "kl": "nats per token, from the trainer's log-probabilities",
    "max_delta_log_prob": "nats, from the trainer's",
    "mean_length": "new tokens per sample",
    "tokens_per_second": "of rank 0",
}
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


def charts(run: RecordedRun) -> Iterator[str]:
    """Return all charts of the run, the most important first; "" for those without data."""
    skipped = skipped_steps(run)
    yield curve("Loss", "mean over ranks", run.points(*LOSS), skipped, low=math.nan)
    tokens, samples = run.points(*TOKENS), run.points(*SAMPLES)
    yield curve("Throughput", "tokens per second, all ranks", tokens) or curve(
        "Throughput", "samples per second, all ranks", samples
    )
    yield stacked_chart("Step time by phase", "ms, rank 0", time_layers(run))
    yield curve("Gradient norm", "before clipping", run.points(*NORM), skipped)
    yield line_chart("Learning rate", "first group", [Line("learning rate", run.points(*RATE))], events=skipped)
    yield from rollout_charts(run)
    yield from memory_charts(run)
    rate = smooth(run.points(*TFLOPS))
    factor, unit = flops_unit(peak_of(rate))
    yield line_chart("Compute", f"{unit} per device, moving mean", [Line(unit, scale_points(rate, factor))])
    yield line_chart(
        "Model FLOPs utilisation",
        "% of peak, moving mean",
        [Line("MFU", scale_points(smooth(run.points(*MFU)), 100))],
    )
    scale = run.points(*SCALE)
    if len({value for _, value in scale}) > 1:
        yield line_chart("Loss scale", "log2", [Line("scale", log2(scale))], events=skipped, low=math.nan)


def curve(title: str, unit: str, points: Points, events: Sequence[float] = (), *, low: float = 0.0) -> str:
    """Return a series and its smoothed line, which is drawn first."""
    lines = [Line("each step", points, faint=True), Line("moving mean", smooth(points))]
    return line_chart(title, unit, lines, events=events, low=low)


def smooth(points: Points) -> Points:
    """Average over a fortieth of the run; a long run is thinned first."""
    few = thin(points, 2000)
    return moving_average(few, max(1, len(few) // 40))


def rollout_charts(run: RecordedRun) -> Iterator[str]:
    """Draw each tag of rollouts: reward, divergence, length, ..."""
    for tag in run.tags(ROLLOUT):
        name = tag.removeprefix(ROLLOUT)
        title = f"Rollouts: {name.replace('_', ' ')}"
        yield curve(title, ROLLOUT_UNITS.get(name, ""), run.points(tag), low=math.nan)


def scale_points(points: Points, factor: float) -> Points:
    return [(step, value * factor) for step, value in points]


def log2(points: Points) -> Points:
    """Return logarithms; values without one are gaps."""
    return [(step, math.log2(value) if 0 < value < math.inf else math.nan) for step, value in points]


def typical(points: Points) -> float:
    """Return the median of the finite values; NaN if there are none."""
    finite = [value for _, value in points if math.isfinite(value)]
    return statistics.median(finite) if finite else math.nan


def skipped_steps(run: RecordedRun) -> list[float]:
    """Return the skipped steps: where the counter of skipped steps rises."""
    found, before = [], 0.0
    for index, (step, count) in enumerate(run.points(*SKIPPED)):
        if count > before and (index or step == 1):  # the counter of a run that was resumed elsewhere is no step
            found.append(step)
        before = count
    return found


def time_layers(run: RecordedRun) -> list[Line]:
    """Split a step's time into disjoint parts, each averaged over a few steps; [] without timers."""
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
    series = {name: moving_average(thin(list(zip(steps, ms)), 2000), span) for name, ms in layers.items() if any(ms)}
    return [Line(name, points, colour=PHASE_COLOURS[name]) for name, points in series.items()]


def step_parts(timers: Mapping[str, float], whole: float) -> dict[str, float]:
    """Return the milliseconds of one step by phase, without nested phases, and the untimed rest.

    Waits for collectives are separate for backward, where they are measured; forward and update include theirs.
    Saving is not part of the step's time and is added on top.
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


def memory_charts(run: RecordedRun) -> Iterator[str]:
    """Draw bytes by owner, stacked, and the totals of process and allocator."""
    owners = memory_owners(run)
    factor, unit = bytes_unit(sum(map(peak_of, owners.values())))
    yield stacked_chart(
        "Memory by owner",
        f"{unit}, rank 0",
        [Line(name, scale_points(each, factor)) for name, each in owners.items()],
    )
    wholes = {name: memory_points(run, word) for word, name in WHOLES.items()}
    factor, unit = bytes_unit(max((peak_of(points) for points in wholes.values()), default=0.0))
    lines = [Line(name, scale_points(points, factor)) for name, points in wholes.items() if points]
    yield line_chart("Total memory", f"{unit}, rank 0", lines)


def memory_owners(run: RecordedRun) -> dict[str, Points]:
    """Return the bytes of each owner over all steps with data, without owners that never hold anything.

    On CUDA the rest of the allocator's bytes (activations, workspaces) is an owner too.
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
    owners = {name: _forward_fill(series, steps) for name, series in found.items()}
    on_device = dict(memory_points(run, "cuda"))
    if on_device:
        sums = [sum(values) for values in zip(*([value for _, value in points] for points in owners.values()))]
        rest = {step: max(0.0, on_device[step] - held) for step, held in zip(steps, sums) if step in on_device}
        owners["activations and others"] = _forward_fill(rest, steps)
    return {name: points for name, points in owners.items() if any(value > 0 for _, value in points)}


def _forward_fill(series: Mapping[float, float], steps: Sequence[float]) -> Points:
    """Return the last known value at every step, since owners are not counted at all steps."""
    points, known = [], 0.0
    for step in steps:
        known = series.get(step, known)
        points.append((step, known))
    return points


def memory_points(run: RecordedRun, word: str) -> Points:
    return run.points(*(f"{prefix}{word}_bytes" for prefix in MEMORY))


def peak_bytes(run: RecordedRun) -> float:
    """Return the maximum in use: on the device if there is one, else of the process; 0 if not recorded."""
    for words in (("cuda_peak", "cuda"), ("process_peak", "process")):
        peak = max((peak_of(memory_points(run, word)) for word in words), default=0.0)
        if peak:
            return peak
    return 0.0


def peak_of(points: Iterable[tuple[float, float]]) -> float:
    return max((value for _, value in points if math.isfinite(value)), default=0.0)


def flops_unit(most: float) -> tuple[float, str]:
    """Return the factor on TFLOPS and the unit that make `most` TFLOPS readable."""
    units = ((1e3, "PFLOPS"), (1.0, "TFLOPS"), (1e-3, "GFLOPS"))
    return next(((1 / size, unit) for size, unit in units if most >= size), (1e6, "MFLOPS"))


def bytes_unit(most: float) -> tuple[float, str]:
    """Return the factor and the unit that make `most` readable."""
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if most >= size:
            return 1 / size, unit
    return 1.0, "bytes"
