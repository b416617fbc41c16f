"""Curriculum learning over sequence length (the section `curriculum_learning`).

Short sequences first make early training stable at large batches and rates (Li et al. 2022, "The Stability-Efficiency
Dilemma").  The difficulty of a step is a number of tokens.  A module whose forward has a keyword `curriculum_seqlen`
gets the number there, as with DeepSpeed, and truncates its inputs itself.  For other modules the inputs are truncated
here: tensors of forward whose second axis is the sequence.

The difficulty is a function of the engine's step counter, which checkpoints hold, so this feature has no state.
DeepSpeed counts from 1: the first step has the difficulty of step 1.

Rejected: passing the keyword to every forward with **kwargs.  Most models ignore unknown keywords; the curriculum
would silently do nothing.
"""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any, final

from torch import Tensor, nn

from zengine.data.order.schedules import Schedule, with_custom_functions
from zengine.data.tree import iter_tensors, map_tensors
from zengine.engine.feature import Feature

if TYPE_CHECKING:
    from zengine.data import CurriculumLoader
    from zengine.engine.clock import Clock
    from zengine.engine.parts import Run, TelemetrySlot
    from zengine.step_report import StepReport

KEYWORD = "curriculum_seqlen"

log = logging.getLogger("zengine")


@final
class SeqlenCurriculum(Feature):
    """Limits the sequences of a training forward to the difficulty of the step."""

    schedule: Schedule
    module: nn.Module
    clock: Clock
    telemetry: TelemetrySlot
    has_keyword: bool  # forward of the module takes the keyword

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule

    def attach(self, run: Run) -> None:
        self.module, self.clock, self.telemetry = run.module, run.clock, run.parts.telemetry
        self.has_keyword = KEYWORD in inspect.signature(self.module.forward).parameters
        if run.parts.world.rank == 0:
            how = (
                f"passed to forward() as {KEYWORD}"
                if self.has_keyword
                else f"forward() of {type(self.module).__name__} has no {KEYWORD}, so axis 1 of its inputs is "
                f"truncated (a loss outside of forward has to truncate its labels to engine.{KEYWORD} as well)"
            )
            log.warning("curriculum learning: sequences up to %s tokens; %s", self.schedule.high, how)

    @property
    def seqlen(self) -> int:
        """Tokens of a sequence in the running step."""
        return self._seqlen_at(self.clock.steps + 1)

    def _seqlen_at(self, step: int) -> int:
        return max(1, self.schedule.at(step))

    def set_custom_schedule(self, functions: Any) -> None:
        """Take the caller's function (or {"seqlen": function}) as the schedule."""
        self.schedule = with_custom_functions({"seqlen": self.schedule}, functions)["seqlen"]

    def forward_begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not self.module.training:
            return args, kwargs
        if self.has_keyword:
            return args, {**kwargs, KEYWORD: self.seqlen}
        args, kwargs = truncate((args, kwargs), self.seqlen)
        return args, kwargs

    def step_end(self, report: StepReport) -> None:
        """Chart the sequence length of the finished step."""
        self.telemetry.write_events([("data/curriculum_seqlen", self._seqlen_at(report.step), report.step)])


@final
class SampleDifficulty(Feature):
    """Charts the difficulties of a curriculum over samples, which the loader applies."""

    loader: CurriculumLoader
    telemetry: TelemetrySlot

    def attach(self, run: Run) -> None:
        self.loader, self.telemetry = run.parts.loader, run.parts.telemetry

    def step_end(self, report: StepReport) -> None:
        found = self.loader.difficulties
        self.telemetry.write_events([(f"data/curriculum_{name}", found[name], report.step) for name in found])


def truncate(inputs: Any, length: int) -> Any:
    """Return `inputs` (nested tuples, lists and dicts) with sequences truncated to `length`, as views.

    The sequence length is the size of axis 1 of the first tensor with two or more axes.  Tensors with that size on
    axis 1 are truncated there; masks (integer or bool) and tensors of (batch, heads, sequence, sequence) on every
    axis of that size after the first.  Other tensors, and shorter sequences, stay unchanged.
    """
    first = next((leaf for leaf in iter_tensors(inputs) if leaf.ndim >= 2), None)
    if first is None or first.shape[1] <= length:
        return inputs
    size = first.shape[1]

    def truncate_one(tensor: Tensor) -> Tensor:
        is_mask = not tensor.is_floating_point() or (tensor.ndim == 4 and tensor.shape[2:] == (size, size))
        axes = range(1, tensor.ndim) if is_mask else range(1, min(tensor.ndim, 2))
        for axis in axes:
            if tensor.shape[axis] == size:
                tensor = tensor.narrow(axis, 0, length)
        return tensor

    return map_tensors(inputs, truncate_one)
