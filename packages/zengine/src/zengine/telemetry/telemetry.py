"""The telemetry slot of the engine: `Silent`, or a `Telemetry` assembled from a plan.

The engine calls three things, always: `span(name)` around a phase, `micro_step_end()` after each micro-step
and `step_end(report)` after each boundary, outside of any span. What is off is an identity object chosen once
by `make_telemetry`, so nothing on the way asks whether it is enabled. Only rank 0 measures and writes: the
other ranks are silent, and a chart shows rank 0's times and memory but the loss and gradient norm of all
ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import attrs
import torch

import zcomm
from zengine.report import StepReport
from zengine.telemetry.comms import CommsLog, NoCommsLog
from zengine.telemetry.memory import MemoryMarks, NoMemoryMarks, read_memory
from zengine.telemetry.plans import TelemetryPlanLike
from zengine.telemetry.sinks import (
    Console,
    CsvSink,
    Sinks,
    TensorBoardSink,
    WandbSink,
    folder_of,
    require_packages,
)
from zengine.telemetry.snapshot import Snapshot
from zengine.telemetry.spans import NoStopwatch, Stopwatch, make_spans
from zengine.telemetry.throughput import NoThroughput, Rate, Throughput

_NOTHING: AbstractContextManager[None] = nullcontext()


@final
class Silent:
    """The identity: measures nothing, writes nothing."""

    def span(self, name: str) -> AbstractContextManager[None]:
        return _NOTHING

    def paused(self) -> AbstractContextManager[None]:
        return _NOTHING

    def micro_step_end(self) -> None: ...

    def step_end(self, report: StepReport) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


@final
@attrs.define(eq=False, kw_only=True)
class Telemetry:
    """Measures on rank 0 and hands one snapshot a boundary to the sinks."""

    device: torch.device  # whose allocator is read
    sinks: Sinks
    stopwatch: Stopwatch | NoStopwatch
    throughput: Throughput | NoThroughput
    marks: MemoryMarks | NoMemoryMarks
    comms: CommsLog | NoCommsLog
    spans: Mapping[str, AbstractContextManager[None]]  # by phase; observed by stopwatch and marks

    def span(self, name: str) -> AbstractContextManager[None]:
        """The context manager of "forward", "backward" or "step"; may be entered again while open.

        A forward without gradients is validation, not part of a step: its time is left out everywhere.
        """
        if name == "forward" and not torch.is_grad_enabled():
            return self.paused()
        try:
            return self.spans[name]
        except KeyError:
            raise ValueError(f"no phase is called {name!r}; there are {', '.join(self.spans)}") from None

    def paused(self) -> AbstractContextManager[None]:
        """Around what is not training (validation, saving): its time is left out of the throughput."""
        return self.throughput.paused()

    def micro_step_end(self) -> None:
        """A micro-step is complete; at a boundary before or after `step_end`, as the caller likes."""
        self.stopwatch.micro_step_end()

    def step_end(self, report: StepReport) -> None:
        """A boundary: one snapshot at x = report.samples to every sink."""
        snapshot = Snapshot(
            report=report,
            rate=self.throughput.step_end(report.samples),
            phase_ms=self.stopwatch.total_ms(),
            micro_ms=self.stopwatch.micro_ms(),
            memory={**read_memory(self.device), **self.marks.read()},
            comms=self.comms.step_end(),
        )
        self.stopwatch.step_end()
        self.sinks.write(snapshot)

    def state_dict(self) -> dict[str, Any]:
        """Empty: times belong to the process that measured them."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start measuring afresh, warm-up included: the counters have jumped."""
        self.stopwatch.reset()
        self.throughput.reset()

    def close(self) -> None:
        """Last lines, then close every sink. Safe to call twice."""
        self.sinks.close()
        self.comms.close()


def make_telemetry(
    plan: TelemetryPlanLike, *, device: torch.device, rank: int, micro_batch_size: int, batch_size: int
) -> Telemetry | Silent:
    """The telemetry that the plan asks for on this rank; or Silent: nothing is asked for, or the rank is not 0.

    batch_size: samples of all ranks a step; micro_batch_size: samples of one rank a micro-step.
    Raises MissingPackageError, on every rank alike, if an enabled monitor's package is not installed.
    """
    require_packages(plan)
    if rank != 0 or not _wants_anything(plan):
        return Silent()
    stopwatch = _make_stopwatch(device) if plan.wall_clock_breakdown else NoStopwatch()
    marks = MemoryMarks(device) if plan.memory_breakdown else NoMemoryMarks()
    throughput = Throughput() if plan.throughput else NoThroughput()
    comms = CommsLog(zcomm.traced) if plan.comms_log else NoCommsLog()

    def farewell() -> str:
        batch = f"batch {batch_size}, micro-batch {micro_batch_size}"
        return "\n".join(filter(None, [_mean_rate(plan, throughput.total, batch), comms.table()]))

    sinks = _open_monitors(plan)
    if plan.steps_per_print or plan.comms_log:
        sinks.add("console", lambda: Console(plan.steps_per_print, table=comms.table, farewell=farewell))
    return Telemetry(
        device=device,
        sinks=sinks,
        stopwatch=stopwatch,
        throughput=throughput,
        marks=marks,
        comms=comms,
        spans=make_spans((*stopwatch.observers(), *marks.observers())),
    )


def _wants_anything(plan: TelemetryPlanLike) -> bool:
    """Throughput alone does not count: it is on by default and goes nowhere without a line or a monitor."""
    monitors = (plan.tensorboard.enabled, plan.csv_monitor.enabled, plan.wandb.enabled)
    breakdowns = (plan.wall_clock_breakdown, plan.memory_breakdown, plan.comms_log)
    return plan.steps_per_print > 0 or any(monitors) or any(breakdowns)


def _make_stopwatch(device: torch.device) -> Stopwatch:
    if device.type == "cuda":
        return Stopwatch(zcomm.traced, lambda: torch.cuda.synchronize(device))
    return Stopwatch(zcomm.traced)


def _open_monitors(plan: TelemetryPlanLike) -> Sinks:
    sinks = Sinks()
    if plan.tensorboard.enabled:
        folder = folder_of(plan.tensorboard)
        sinks.add(f"TensorBoard events in {folder}", lambda: TensorBoardSink(folder))
    if plan.csv_monitor.enabled:
        place = folder_of(plan.csv_monitor)
        sinks.add(f"CSV files in {place}", lambda: CsvSink(place))
    if plan.wandb.enabled:
        sinks.add(f"Weights & Biases project {plan.wandb.project!r}", lambda: WandbSink(plan.wandb))
    return sinks


def _mean_rate(plan: TelemetryPlanLike, total: Rate, batch: str) -> str:
    if not (total and plan.steps_per_print):
        return ""
    return (
        f"throughput: {total.samples_per_s:.1f} samples/s, {total.step_ms:.1f} ms a step "
        f"(mean of {total.steps} steps; {batch})"
    )
