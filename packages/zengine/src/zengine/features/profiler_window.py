"""`profiler`: torch's profiler over a window of steps, written as one trace per selected rank.

The window opens at the end of the step before it (or at once if it begins with the first) and closes after its last
step, so it has whole steps: data, forward, backward, update.  A run that resumes inside the window opens it there; a
run that ends inside it writes the steps so far.

On CUDA `memory_snapshot` also records the allocator's history, for pytorch.org/memory_viz.  Other devices have no
such record: there the trace has every allocation, and memory_rank0.json the bytes in use over time, from the trace.
"""

from __future__ import annotations

import enum
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch

from zengine._compat import begin_memory_history, end_memory_history
from zengine.engine.feature import Feature
from zengine.telemetry.sinks import log_os_errors

if TYPE_CHECKING:
    from zengine.config.plan.telemetry import WindowPlan
    from zengine.engine.parts import Run
    from zengine.step_report import StepReport

log = logging.getLogger("zengine")


class State(enum.Enum):
    """State of the window."""

    BEFORE = enum.auto()
    INSIDE = enum.auto()  # the profiler records: some microseconds an operation, and memory for its events
    AFTER = enum.auto()  # written; or this rank does not record


@final
class ProfilerWindow(Feature):
    """Records one window.  Invariant: torch's profiler runs exactly while the state is INSIDE."""

    def __init__(self, plan: WindowPlan, folder: Path) -> None:
        """Wait for the window.  folder: folder of the traces, created by the first write."""
        self._plan = plan
        self._folder = folder
        self._state = State.AFTER
        self._first = plan.start_step  # of the steps recorded, for the file's name

    def attach(self, run: Run) -> None:
        self._run = run
        if not self._plan.ranks or run.parts.world.rank in self._plan.ranks:
            self._state = State.BEFORE

    def forward_begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._state is State.BEFORE:
            self._approach(self._run.clock.steps)
        return args, kwargs

    def step_end(self, report: StepReport) -> None:
        if self._state is State.INSIDE and report.step >= self._last:
            self._finish(report.step)
        elif self._state is State.BEFORE:
            self._approach(report.step)

    def close(self) -> None:
        """Write a window that is still open."""
        if self._state is State.INSIDE:
            self._finish(self._run.clock.steps)

    @property
    def _last(self) -> int:
        return self._plan.start_step + self._plan.steps - 1

    @property
    def _on_cuda(self) -> bool:
        return bool(self._run.parts.world.device.type == "cuda")

    def _approach(self, done: int) -> None:
        """Open the window if the next step is in it; give up if it has passed."""
        if done >= self._last:
            self._state = State.AFTER
        elif done + 1 >= self._plan.start_step:
            self._first = done + 1
            self._begin()

    def _begin(self) -> None:
        plan, activities = self._plan, [torch.profiler.ProfilerActivity.CPU]
        activities += [torch.profiler.ProfilerActivity.CUDA] * self._on_cuda
        self._snapshots = plan.memory_snapshot and self._on_cuda and begin_memory_history()
        self._profiler = torch.profiler.profile(
            activities=activities,
            record_shapes=plan.record_shapes,
            with_stack=plan.with_stack,
            profile_memory=plan.profile_memory or (plan.memory_snapshot and not self._snapshots),
        )
        self._profiler.start()
        self._state = State.INSIDE

    def _finish(self, last: int) -> None:
        self._state = State.AFTER
        self._profiler.stop()
        with log_os_errors(f"the trace of steps {self._first} to {last} in {self._folder}"):
            self._write(last)
        del self._profiler  # its events are large

    def _write(self, last: int) -> None:
        rank = self._run.parts.world.rank
        self._folder.mkdir(parents=True, exist_ok=True)
        trace = self._folder / f"trace_rank{rank}_steps{self._first}-{last}.json"
        self._profiler.export_chrome_trace(str(trace))
        written = [trace]
        if self._snapshots and end_memory_history(self._folder / f"memory_rank{rank}.pickle"):
            written.append(self._folder / f"memory_rank{rank}.pickle")
        elif self._plan.memory_snapshot:
            written.append(self._folder / f"memory_rank{rank}.json")
            written[-1].write_text(json.dumps(memory_timeline(trace)) + "\n", encoding="utf-8")
        log.warning("steps %d to %d are recorded in %s", self._first, last, ", ".join(map(str, written)))


def memory_timeline(trace: Path) -> dict[str, list[tuple[float, int]]]:
    """Return (milliseconds since the first, bytes in use) by device, from the allocations of a chrome trace."""
    events: Iterable[Mapping[str, Any]] = json.loads(trace.read_text(encoding="utf-8")).get("traceEvents", ())
    found: dict[str, list[tuple[float, int]]] = {}
    for event in events:
        if event.get("name") == "[memory]":
            facts = event["args"]
            device = {0: "cpu", 1: "cuda"}.get(facts.get("Device Type"), "other")
            found.setdefault(device, []).append((float(event["ts"]), int(facts.get("Total Allocated", 0))))
    begin = min((when for points in found.values() for when, _ in points), default=0.0)
    return {
        device: [((when - begin) / 1e3, nbytes) for when, nbytes in sorted(points)]
        for device, points in found.items()
    }
