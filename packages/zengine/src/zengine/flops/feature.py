"""`flops_profiler`: profiles one step of the run module by module.

Rank 0 measures the first micro-step that begins after `profile_step` steps: its forward by module, and the FLOPs of
its backward as a whole.  A table goes to the standard output or `output_file`, and flops.json to the run's folder if
there is one.
"""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch

from zengine.engine.feature import Feature
from zengine.flops.meter import make_counter
from zengine.flops.profiler import FlopsProfiler, publish
from zengine.flops.table import format_profile
from zengine.telemetry.sinks import log_os_errors

if TYPE_CHECKING:
    from torch import Tensor

    from zengine.config.plan.telemetry import FlopsPlan
    from zengine.engine.clock import MicroStep
    from zengine.engine.parts import Run

FILE = "flops.json"


class Stage(enum.Enum):
    """Progress of the measurement."""

    WAITING = enum.auto()  # for the step; also after a forward that raised
    FORWARD = enum.auto()  # in the forward: modules are watched
    LOSS = enum.auto()  # the forward is measured; a loss is being computed from it
    BACKWARD = enum.auto()  # the counter is on
    DONE = enum.auto()  # told; or this rank does not measure


@final
class FlopsProfiling(Feature):
    """Measures once.  Invariant: no hook is installed between two steps."""

    def __init__(self, plan: FlopsPlan, folder: Path | None) -> None:
        """folder: of the run, for flops.json; None: not written."""
        self._plan = plan
        self._folder = folder
        self._stage = Stage.DONE
        self._counter: Any = None  # of the backward, once it is counted
        self._is_counting = False  # the counter is entered

    def attach(self, run: Run) -> None:
        self._run = run
        if run.parts.world.rank == 0:
            self._profiler = FlopsProfiler(run.module, run, self._plan.recompute_fwd_factor)
            self._stage = Stage.WAITING

    def forward_begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._stop_counting()
        if self._stage is not Stage.DONE and self._is_time():
            self._profiler.start_profile()
            self._stage = Stage.FORWARD
        return args, kwargs

    def forward_end(self, output: Any) -> Any:
        if self._stage is Stage.FORWARD:
            self._profiler.stop_profile()
            self._stage = Stage.LOSS
        return output

    def backward_begin(self, micro: MicroStep, loss: Tensor) -> Tensor:
        if self._stage is Stage.LOSS:
            self._counter = make_counter()
            self._counter.__enter__()
            self._is_counting = True
            self._stage = Stage.BACKWARD
        return loss

    def backward_end(self, micro: MicroStep) -> None:
        if self._stage is Stage.BACKWARD:
            self._stop_counting()
            self._tell(int(self._counter.get_total_flops()))
            self._stage = Stage.DONE

    def close(self) -> None:
        self._stop_counting()

    def _is_time(self) -> bool:
        return torch.is_grad_enabled() and self._run.clock.steps >= self._plan.profile_step

    def _stop_counting(self) -> None:
        """Leave the backward's counter, also after an exception, and remove the forward's hooks."""
        if self._is_counting:
            self._is_counting = False
            self._counter.__exit__(None, None, None)
        if self._stage is not Stage.DONE:
            self._profiler.stop_profile()

    def _tell(self, backward_flops: int) -> None:
        """Publish the profile."""
        profile = self._profiler.profile(backward_flops)
        self._profiler.end_profile()
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
