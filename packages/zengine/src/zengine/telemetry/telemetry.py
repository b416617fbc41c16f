"""The telemetry slot of the engine: `Silent`, or a `Telemetry` assembled from a plan.

The engine calls three things, always: `span(name)` around a phase, `micro_step_end()` after each micro-step
and `step_end(report)` after each boundary, outside of any span. What is off is an identity object chosen once
by `make_telemetry`, so nothing on the way asks whether it is enabled. Only rank 0 measures and writes: the
other ranks are silent, and a chart shows rank 0's times and memory but the loss and gradient norm of all
ranks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, final

import attrs
import torch

from zengine.report import StepReport
from zengine.telemetry.comms import CommsLog, NoCommsLog
from zengine.telemetry.countdown import Countdown
from zengine.telemetry.devices import Fleet
from zengine.telemetry.memory import MemoryMarks, NoMemoryMarks, Owners, read_memory
from zengine.telemetry.sinks import Events, Sinks
from zengine.telemetry.snapshot import RecentLoss, Snapshot
from zengine.telemetry.spans import NoStopwatch, Stopwatch
from zengine.telemetry.subject import Subject
from zengine.telemetry.throughput import NoThroughput, Throughput
from zengine.telemetry.work import Meter

logger = logging.getLogger("zengine.telemetry")
NO_ATTENTION = (
    "perf/tflops leaves out the attention: the model's config tells no number of layers and width (set "
    "timers.throughput.num_layers and timers.throughput.hidden_size)"
)


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
    meter: Meter  # tokens and FLOPs of a step
    fleet: Fleet  # the devices that train together
    owners: Owners  # memory by owner
    recent_loss: RecentLoss  # over as many steps as a console line stands for
    countdown: Countdown  # until the figures of a bench run are complete
    subject: tuple[Subject, ...] = ()  # the engine, from `begin` on
    layer_norms: dict[str, float] = attrs.field(factory=dict)  # of the boundary under way; mostly empty
    remarks: list[str] = attrs.field(factory=list)  # to be said at the first step that has tokens

    def begin(self, subject: Subject) -> None:
        """The engine is complete; called once."""
        self.subject = (subject,)
        self.meter.formula = subject.formula
        self.owners.ledger = subject.ledger
        if subject.recomputes:
            self.recomputes(1.0)
        if not subject.formula.num_layers * subject.formula.hidden_size:
            self.remarks.append(NO_ATTENTION)
        self.sinks.begin(subject.record)

    def span(self, name: str) -> AbstractContextManager[None]:
        """The context manager of a phase (`spans.PHASES`); may be entered again while open.

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

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A training forward is about to get these arguments."""
        self.meter.forward(args, kwargs)

    def report_tokens(self, num_tokens: int) -> None:
        """Tokens of this rank in this step; they count in place of those that forward was seen to get."""
        self.meter.tell(num_tokens)

    def recomputes(self, share: float) -> None:
        """That share of the layers is computed again in backward."""
        self.meter.coefficient = 3 + share

    def counted(self, flops_per_sample: float) -> None:
        """The operations of a step were counted."""
        self.meter.flops_per_sample = flops_per_sample

    def layers(self, norms: Mapping[str, float]) -> None:
        """Gradient norms by layer, for the boundary under way, in any unit: the report has the norm of all."""
        self.layer_norms = dict(norms)

    def write_events(self, events: Events, flush: bool = True) -> None:
        """Scalars of the program's own, (tag, value, x) each, to every sink; `flush` (DeepSpeed's) is always so."""
        self.sinks.write_events(events)

    def micro_step_end(self) -> None:
        """A micro-step is complete; at a boundary before or after `step_end`, as the caller likes."""
        self.stopwatch.micro_step_end()

    def step_end(self, report: StepReport) -> None:
        """A boundary: one snapshot to every sink."""
        work = self.meter.step_end(report.samples)
        while self.remarks and work.tokens:
            logger.warning("%s", self.remarks.pop())
        snapshot = Snapshot(
            report=report,
            rate=self.throughput.step_end(report.samples, work),
            fleet=self.fleet,
            epochs=tuple(passes for subject in self.subject for passes in subject.epochs()),
            phase_ms=self.stopwatch.total_ms(),
            micro_ms=self.stopwatch.micro_ms(),
            memory={**read_memory(self.device), **self.marks.read(), **self.owners.step_end()},
            comms=self.comms.step_end(),
            layer_norms=in_units_of(report.grad_norm, self.layer_norms),
            mean_loss=self.recent_loss.add(report),
        )
        self.stopwatch.step_end()
        self.layer_norms = {}
        self.countdown.step_end()
        self.sinks.write(snapshot)

    def state_dict(self) -> dict[str, Any]:
        """Empty: times belong to the process that measured them."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start measuring afresh, warm-up included: the counters have jumped."""
        self.stopwatch.reset()
        self.throughput.reset()
        self.recent_loss.clear()
        self.countdown.reset()

    def close(self) -> None:
        """Last lines, then close every sink. Safe to call twice."""
        self.sinks.close()
        self.comms.close()

    @property
    def enabled(self) -> bool:
        """Whether there is a place that `write_events` reaches."""
        return bool(self.sinks)

    @property
    def bench_done(self) -> bool:
        """Whether the steps that `bench_steps` asks for are measured; the same on all ranks."""
        return self.countdown.is_over


def in_units_of(whole: float, parts: Mapping[str, float]) -> dict[str, float]:
    """`parts`, whose squares shall add up to that of `whole`; as they are where they cannot."""
    total = math.hypot(*parts.values())
    factor = whole / total if total and math.isfinite(total) and math.isfinite(whole) else 1.0
    return {name: norm * factor for name, norm in parts.items()}
