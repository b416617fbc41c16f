"""Snapshot of one boundary, and the tags of its charts.

Two families of tags.  `Train/Samples/...` are DeepSpeed's, so existing dashboards keep working; their x axis is the
number of samples seen by all ranks.  All other tags are ours, lower case, and their x axis is the step number.
Values that were not measured are absent, never zero.

| tag | unit |
|---|---|
| `train/loss` | mean over ranks and the last `steps_per_print` steps; equals the console line at its step |
| `train/grad_norm`, `train/learning_rate` | of this step: before clipping; of the first group |
| `Train/Samples/train_loss` | of this step, mean over its micro-steps and ranks, as DeepSpeed's pipelines write it |
| `train/global_step`, `train/epoch` | boundaries; passes over the data, with fractions (our loader only) |
| `perf/step_time_ms`, `perf/samples_per_second`, `perf/tokens_per_second` | of all ranks together |
| `perf/tflops`, `perf/tflops_counted` | of one device: by the formula, and by counted operations |
| `perf/mfu` | share of the device's peak, without recomputation |
| `memory/<owner>_bytes`, `memory/cuda_bytes`, ... | of rank 0 |
| `communication/<operation>_bytes`, `..._ms` | of rank 0, in this step |
| `gradients/<layer>` | norm of the layer's gradients over all ranks, unscaled, before clipping |
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Mapping
from typing import final

import attrs

from zengine.step_report import StepReport
from zengine.telemetry.comms import Tally
from zengine.telemetry.spans import MICRO
from zengine.telemetry.throughput import Rate
from zengine.telemetry.work import Fleet

SAMPLES = "Train/Samples/"  # the family whose x axis is samples
TIME = "Train/Samples/elapsed_time_ms_"
TRAIN = "train/"
PERF = "perf/"
MEMORY = "memory/"
COMMUNICATION = "communication/"
GRADIENTS = "gradients/"


@final
class RecentLoss:
    """Mean loss of the last `span` steps.

    Skipped steps are excluded: an overflowed loss changed no weights, and the console prints a line for its step.  A
    non-finite loss that did change them makes the mean NaN or infinite.
    """

    def __init__(self, span: int) -> None:
        self._losses: collections.deque[float] = collections.deque(maxlen=span)  # 0 for a skipped step
        self._applied: collections.deque[bool] = collections.deque(maxlen=span)

    def add(self, report: StepReport) -> float:
        """Add a step and return the mean; that step's own loss if all were skipped."""
        self._losses.append(report.loss if report.applied else 0.0)
        self._applied.append(report.applied)
        count = sum(self._applied)
        return sum(self._losses) / count if count else report.loss

    def clear(self) -> None:
        """Start a new interval."""
        self._losses.clear()
        self._applied.clear()


@attrs.frozen(kw_only=True)
class Snapshot:
    """One boundary: the engine's report and the measurements of telemetry."""

    report: StepReport
    rate: Rate = attrs.field(factory=Rate)  # this step; falsy while not measured
    fleet: Fleet = attrs.field(factory=Fleet)  # devices of the rate
    epochs: tuple[float, ...] = ()  # one number, passes over the data; empty if unknown
    phase_ms: Mapping[str, float] = attrs.field(factory=dict)  # totals by timer; empty without breakdown
    micro_ms: Mapping[str, float] = attrs.field(factory=dict)  # the same for the last micro-step
    memory: Mapping[str, int] = attrs.field(factory=dict)  # bytes by name
    comms: Mapping[str, Tally] = attrs.field(factory=dict)  # collectives of this step, by operation
    layer_norms: Mapping[str, float] = attrs.field(factory=dict)  # by layer; empty in most steps
    mean_loss: float = attrs.field()  # of the last steps, this one included

    @mean_loss.default
    def _loss_of_this_step(self) -> float:
        return self.report.loss

    def scalars(self) -> Mapping[str, float]:
        """Return every number of this boundary by tag."""
        return self._scalars

    @functools.cached_property
    def _scalars(self) -> dict[str, float]:  # several sinks ask
        return {
            **{SAMPLES + name: value for name, value in _samples(self.report).items()},
            **{TIME + timer: ms for timer, ms in self.phase_ms.items()},
            **{TIME + timer + MICRO: ms for timer, ms in self.micro_ms.items()},
            f"{TRAIN}loss": self.mean_loss,
            **{TRAIN + name: value for name, value in _training(self.report).items()},
            **{f"{TRAIN}epoch": passes for passes in self.epochs},
            **{PERF + name: value for name, value in speed(self.rate, self.fleet).items()},
            **{f"{MEMORY}{_word(name)}_bytes": float(nbytes) for name, nbytes in self.memory.items()},
            **{f"{COMMUNICATION}{op}_bytes": float(tally.nbytes) for op, tally in self.comms.items()},
            **{f"{COMMUNICATION}{op}_ms": tally.ms for op, tally in self.comms.items()},
            **{GRADIENTS + layer: norm for layer, norm in self.layer_norms.items()},
        }

    def x(self, tag: str) -> int:
        """Return the x coordinate of a tag: samples or steps."""
        return self.report.samples if tag.startswith(SAMPLES) else self.report.step


def speed(rate: Rate, fleet: Fleet) -> dict[str, float]:
    """Return a rate in the units of the charts; empty if not measured."""
    if not rate:
        return {}
    found = {"step_time_ms": rate.step_ms, "samples_per_second": rate.samples_per_s}
    if rate.tokens:
        found["tokens_per_second"] = rate.per_s(rate.tokens)
    for name, flops in (("tflops", rate.flops), ("tflops_counted", rate.counted_flops)):
        if flops:
            found[name] = rate.per_s(flops) / fleet.num_devices / 1e12
    if rate.useful_flops and fleet.peak_tflops:
        found["mfu"] = rate.per_s(rate.useful_flops) / fleet.num_devices / 1e12 / fleet.peak_tflops
    return found


def _samples(report: StepReport) -> dict[str, float]:
    """Return DeepSpeed's tags; `lr` is the first parameter group, `lr_group_1`, ... are the others."""
    names = ["lr", *(f"lr_group_{i}" for i in range(1, len(report.lr)))]
    return {
        "train_loss": report.loss,
        **dict(zip(names, report.lr)),
        "grad_norm": report.grad_norm,
        "loss_scale": report.loss_scale,
        "skipped_steps": float(report.skipped_steps),
    }


def _training(report: StepReport) -> dict[str, float]:
    return {
        **dict(zip(["learning_rate"], report.lr)),
        "grad_norm": report.grad_norm,
        "global_step": float(report.step),
    }


def _word(owner: str) -> str:
    return owner.replace(" ", "_")
