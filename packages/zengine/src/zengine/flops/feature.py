"""FLOPs features of an engine: the operations of one step, or one micro-step module by module.

`CountFlops` ("timers.throughput.count_flops_at") counts the operations of one step with torch.utils.flop_counter, for
a chart beside the formula's: it shows the error of the formula for this model.  The step is trained anyway, so
nothing runs twice, but it is slower.  Recomputation counts, since the device does it; operations inside a compiled
region are not seen.

`FlopsProfiling` ("flops_profiler") profiles the first micro-step that begins after `profile_step` steps, on rank 0:
its forward by module, and the FLOPs of its backward as a whole.  A table goes to the standard output or
`output_file`, and flops.json to the run's folder if there is one.
"""

from __future__ import annotations

import enum
import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch

from zengine.engine.feature import Feature
from zengine.flops.meter import make_counter
from zengine.flops.profile import format_profile
from zengine.flops.profiler import FlopsProfiler, publish
from zengine.telemetry.sinks import log_os_errors

if TYPE_CHECKING:
    from torch import Tensor

    from zengine.config.plan.telemetry import FlopsPlan
    from zengine.engine.clock import MicroStep
    from zengine.engine.parts import Run

__all__ = ["FILE", "CountFlops", "FlopsProfiling"]

FILE = "flops.json"


@final
class CountFlops(Feature):
    """Counts from the first forward of a step to its boundary, on rank 0."""

    run: Run

    def __init__(self, step: int) -> None:
        self.step = step  # counted from 1
        self.counter = make_counter()
        self.counting: list[ExitStack] = []  # one that holds the counter's mode while it counts, else empty

    def attach(self, run: Run) -> None:
        self.run = run

    def forward_begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        clock = self.run.clock
        due = clock.steps + 1 == self.step and self.run.parts.world.rank == 0
        if due and not self.counting and torch.is_grad_enabled():
            self.counting.append(ExitStack())
            self.counting[0].enter_context(self.counter)
        return args, kwargs

    def step_begin(self) -> None:
        clock, num_ranks = self.run.clock, self.run.parts.groups.table.size
        while self.counting:
            self.counting.pop().close()
            samples = clock.samples_per_micro_step * clock.index  # of all ranks
            self.run.parts.telemetry.counted(self.counter.get_total_flops() * num_ranks / samples)

    def close(self) -> None:
        """Stop counting a step that never completed."""
        while self.counting:
            self.counting.pop().close()


class Progress(enum.Enum):
    """Progress of the measurement."""

    WAITING = enum.auto()  # for the step; also after a forward that raised
    FORWARD = enum.auto()  # in the forward: modules are watched
    LOSS = enum.auto()  # the forward is measured; a loss is being computed from it
    BACKWARD = enum.auto()  # the counter is on
    DONE = enum.auto()  # published; or this rank does not measure


@final
class FlopsProfiling(Feature):
    """Measures one micro-step.  Invariant: no hook is installed between two steps."""

    def __init__(self, plan: FlopsPlan, folder: Path | None) -> None:
        """Wait for the step.  folder: folder of the run, for flops.json; None: not written."""
        self._plan = plan
        self._folder = folder
        self._progress = Progress.DONE
        self._counter: Any = None  # of the backward, once it is counted
        self._is_counting = False  # the counter is entered

    def attach(self, run: Run) -> None:
        self._run = run
        self.profiler = FlopsProfiler(run.module, run, self._plan.recompute_fwd_factor)
        if run.parts.world.rank == 0:
            self._progress = Progress.WAITING

    def forward_begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._stop_counting()
        if self._progress is not Progress.DONE and self._is_time():
            self.profiler.start_profile()
            self._progress = Progress.FORWARD
        return args, kwargs

    def forward_end(self, output: Any) -> Any:
        if self._progress is Progress.FORWARD:
            self.profiler.stop_profile()
            self._progress = Progress.LOSS
        return output

    def backward_begin(self, micro: MicroStep, loss: Tensor) -> Tensor:
        if self._progress is Progress.LOSS:
            self._counter = make_counter()
            self._counter.__enter__()
            self._is_counting = True
            self._progress = Progress.BACKWARD
        return loss

    def backward_end(self, micro: MicroStep) -> None:
        if self._progress is Progress.BACKWARD:
            self._stop_counting()
            self._publish(int(self._counter.get_total_flops()))
            self._progress = Progress.DONE

    def close(self) -> None:
        self._stop_counting()

    def _is_time(self) -> bool:
        return torch.is_grad_enabled() and self._run.clock.steps >= self._plan.profile_step

    def _stop_counting(self) -> None:
        """Leave the backward's counter, also after an exception, and remove the forward's hooks."""
        if self._is_counting:
            self._is_counting = False
            self._counter.__exit__(None, None, None)
        if self._progress is not Progress.DONE:
            self.profiler.stop_profile()

    def _publish(self, backward_flops: int) -> None:
        """Publish the profile."""
        profile = self.profiler.profile(backward_flops)
        self.profiler.end_profile()
        steps, plan = self._run.clock.steps, self._plan
        text = format_profile(
            profile, step=steps, module_depth=plan.module_depth, top_modules=plan.top_modules, detailed=plan.detailed
        )
        with log_os_errors(f"the table of FLOPs in {plan.output_file or 'the standard output'}"):
            publish(text, plan.output_file)
        if self._folder is None:
            return
        with log_os_errors(f"{FILE} in {self._folder}"):
            facts = {"step": steps, "micro_batch_size": self._run.micro_batch_size}
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / FILE).write_text(json.dumps({**facts, **profile.as_json()}) + "\n", encoding="utf-8")
