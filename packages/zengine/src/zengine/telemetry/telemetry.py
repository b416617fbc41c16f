"""Telemetry of an engine: `Telemetry`, assembled from a plan, or its null object `Silent`.

The engine always makes three calls: `span(name)` around a phase, `micro_step_end()` after each micro-step and
`step_end(report)` after each boundary, outside any span.  Disabled parts are null objects chosen once by
`make_telemetry`, so no code on the way checks a flag.  Only rank 0 measures and writes; a chart shows rank 0's times
and memory, but the loss and gradient norm of all ranks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, final

import attrs
import torch

import zcomm
from zengine.telemetry.comms import CommsLog, NoCommsLog
from zengine.telemetry.instants import DeviceInstants
from zengine.telemetry.memory import MemoryMarks, NoMemoryMarks, Owners, read_memory
from zengine.telemetry.sinks import Events, Sinks
from zengine.telemetry.sinks.bench import Bench
from zengine.telemetry.sinks.console import Console
from zengine.telemetry.sinks.table import open_sinks
from zengine.telemetry.snapshot import RecentLoss, Snapshot
from zengine.telemetry.spans import NoStopwatch, Stopwatch, make_spans
from zengine.telemetry.throughput import NoThroughput, Rate, Throughput
from zengine.telemetry.work import Fleet, Meter, peak_of

if TYPE_CHECKING:
    from zengine.config.plan.telemetry import TelemetryPlan
    from zengine.step_report import StepReport
    from zengine.telemetry.silent import Countdown
    from zengine.telemetry.subject import Subject

logger = logging.getLogger("zengine.telemetry")
NO_ATTENTION = (
    "perf/tflops excludes attention: the model's config has no number of layers and width (set "
    "timers.throughput.num_layers and timers.throughput.hidden_size)"
)


@final
@attrs.define(eq=False, kw_only=True)
class Telemetry:
    """Measures on rank 0 and writes one snapshot per boundary to the sinks."""

    device: torch.device  # whose allocator is read
    sinks: Sinks
    stopwatch: Stopwatch | NoStopwatch
    throughput: Throughput | NoThroughput
    marks: MemoryMarks | NoMemoryMarks
    comms: CommsLog | NoCommsLog
    spans: Mapping[str, AbstractContextManager[None]]  # by phase; observed by stopwatch and marks
    meter: Meter  # tokens and FLOPs of a step
    fleet: Fleet  # the devices that train together
    owners: Owners  # memory by owner
    recent_loss: RecentLoss  # over the steps of a console line
    countdown: Countdown  # until the figures of a bench run are complete
    subject: tuple[Subject, ...] = ()  # the engine, from `begin` on
    layer_norms: dict[str, float] = attrs.field(factory=dict)  # of the current boundary; usually empty
    warnings: list[str] = attrs.field(factory=list)  # to log at the first step that has tokens

    def begin(self, subject: Subject) -> None:
        """Receive the complete engine; called once."""
        self.subject = (subject,)
        self.meter.formula = subject.formula
        self.owners.ledger = subject.ledger
        if subject.recomputes:
            self.recomputes(1.0)
        if not subject.formula.num_layers * subject.formula.hidden_size:
            self.warnings.append(NO_ATTENTION)
        self.sinks.begin(subject.record)

    def span(self, name: str) -> AbstractContextManager[None]:
        """Return the context manager of a phase (`spans.PHASES`), which is reentrant.

        A forward without gradients is validation, not part of a step: its time is excluded everywhere.

        Raises ValueError for another name.
        """
        if name == "forward" and not torch.is_grad_enabled():
            return self.paused()
        try:
            return self.spans[name]
        except KeyError:
            raise ValueError(f"unknown phase {name!r}; choose one of {', '.join(self.spans)}") from None

    def paused(self) -> AbstractContextManager[None]:
        """Return a context manager around work that is not training (validation, saving): throughput excludes it."""
        return self.throughput.paused()

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Count the tokens of a training forward that is about to run."""
        self.meter.forward(args, kwargs)

    def report_tokens(self, num_tokens: int) -> None:
        """Set the number of tokens of this rank in this step, in place of the counted ones."""
        self.meter.report_tokens(num_tokens)

    def recomputes(self, share: float) -> None:
        """Set the share of the layers that backward computes again."""
        self.meter.coefficient = 3 + share

    def counted(self, flops_per_sample: float) -> None:
        """Set the counted FLOPs per sample."""
        self.meter.flops_per_sample = flops_per_sample

    def layers(self, norms: Mapping[str, float]) -> None:
        """Set the gradient norms by layer of the current boundary, in any unit; the report has the total norm."""
        self.layer_norms = dict(norms)

    def write_events(self, events: Events, flush: bool = True) -> None:
        """Write the program's own scalars, (tag, value, x) each, to every sink; sinks always flush."""
        self.sinks.write_events(events)

    def micro_step_end(self) -> None:
        """End a micro-step; at a boundary before or after `step_end`."""
        self.stopwatch.micro_step_end()

    def step_end(self, report: StepReport) -> None:
        """End a step: write one snapshot to every sink."""
        work = self.meter.step_end(report.samples)
        while self.warnings and work.tokens:
            logger.warning("%s", self.warnings.pop())
        snapshot = Snapshot(
            report=report,
            rate=self.throughput.step_end(report.samples, work),
            fleet=self.fleet,
            epochs=tuple(passes for subject in self.subject for passes in subject.epochs()),
            phase_ms=self.stopwatch.total_ms(),
            micro_ms=self.stopwatch.micro_ms(),
            memory={**read_memory(self.device), **self.marks.read(), **self.owners.step_end()},
            comms=self.comms.step_end(),
            layer_norms=scale_norms(report.grad_norm, self.layer_norms),
            mean_loss=self.recent_loss.add(report),
        )
        self.stopwatch.step_end()
        self.layer_norms = {}
        self.countdown.step_end()
        self.sinks.write(snapshot)

    def state_dict(self) -> dict[str, Any]:
        """Return {}: times belong to the process that measured them."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restart measuring, warm-up included: the counters have jumped."""
        self.stopwatch.reset()
        self.throughput.reset()
        self.recent_loss.clear()
        self.countdown.reset()

    def close(self) -> None:
        """Print the final lines and close every sink.  Safe to call twice."""
        self.sinks.close()
        self.comms.close()

    @property
    def enabled(self) -> bool:
        """True if `write_events` reaches a sink."""
        return bool(self.sinks)

    @property
    def bench_done(self) -> bool:
        """True once `bench_steps` steps are measured; equal on all ranks."""
        return self.countdown.is_over


@attrs.frozen(kw_only=True)
class Scope:
    """Device, ranks and batch sizes of the measured run."""

    device: torch.device  # of this rank
    micro_batch_size: int  # samples per rank and micro-step
    batch_size: int  # samples per step over all ranks
    replicas: int  # ranks that train together
    pieces: int  # ranks that share the tokens of a sample
    num_devices: int  # all ranks; differs from `replicas` where several ranks hold one model


def assemble(plan: TelemetryPlan, scope: Scope, countdown: Countdown) -> Telemetry:
    """Build rank 0's telemetry: an active part or its null object for each switch of the plan, then the sinks."""
    stopwatch = _make_stopwatch(scope.device) if plan.wall_clock_breakdown else NoStopwatch()
    marks = MemoryMarks(scope.device) if plan.memory_breakdown else NoMemoryMarks()
    throughput = Throughput(warmup_steps=plan.rates.warmup_steps) if plan.throughput else NoThroughput()
    comms = CommsLog(zcomm.traced, plan.comms_ops) if plan.comms_log else NoCommsLog()
    fleet = Fleet(num_devices=scope.num_devices, peak_tflops=plan.rates.peak_tflops or peak_of(scope.device))

    def summary() -> str:
        batch = f"batch {scope.batch_size}, micro-batch {scope.micro_batch_size}"
        return "\n".join(filter(None, [_mean_rate(plan, throughput.total, batch), comms.table()]))

    sinks = open_sinks(plan, _empty_charts(plan, fleet))
    if plan.steps_per_print or plan.comms_log:
        sinks.add("console", lambda: Console(plan.steps_per_print, table=comms.table, farewell=summary))
    if plan.bench_steps:
        sinks.add("bench summary", lambda: Bench(plan.bench_steps))
    return Telemetry(
        device=scope.device,
        sinks=sinks,
        stopwatch=stopwatch,
        throughput=throughput,
        marks=marks,
        comms=comms,
        spans=make_spans((*stopwatch.observers(), *marks.observers())),
        meter=Meter(replicas=scope.replicas, pieces=scope.pieces, tokens_per_sample=plan.rates.tokens_per_sample),
        fleet=fleet,
        owners=Owners(always=plan.memory_breakdown),
        recent_loss=RecentLoss(max(1, plan.steps_per_print)),
        countdown=countdown,
    )


def _make_stopwatch(device: torch.device) -> Stopwatch:
    return Stopwatch(zcomm.traced, DeviceInstants()) if device.type == "cuda" else Stopwatch(zcomm.traced)


def _empty_charts(plan: TelemetryPlan, fleet: Fleet) -> list[str]:
    """Return the sections and charts that stay empty in this run."""
    needs = {
        "Speed": plan.throughput,
        "MFU": fleet.peak_tflops > 0,
        "Phases": plan.wall_clock_breakdown,
        "bytes after each phase": plan.memory_breakdown,
        "Communication": plan.comms_log,
        "Gradients": plan.gradient_histograms > 0,
    }
    return [name for name, is_there in needs.items() if not is_there]


def _mean_rate(plan: TelemetryPlan, total: Rate, batch: str) -> str:
    if not (total and plan.steps_per_print):
        return ""
    return (
        f"throughput: {total.samples_per_s:.1f} samples/s, {total.step_ms:.1f} ms a step "
        f"(mean of {total.steps} steps; {batch})"
    )


def scale_norms(whole: float, parts: Mapping[str, float]) -> dict[str, float]:
    """Scale `parts` so that their squares sum to that of `whole`; unchanged if that is impossible."""
    total = math.hypot(*parts.values())
    factor = whole / total if total and math.isfinite(total) and math.isfinite(whole) else 1.0
    return {name: norm * factor for name, norm in parts.items()}
