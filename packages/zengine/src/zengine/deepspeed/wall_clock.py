"""`engine.timers`, `.engine_timers`, `.get_wall_clock_timers()` and `._config`: DeepSpeed's objects.

With "wall_clock_breakdown" (or a FLOPs profiler) the timers run around the engine's calls; at each step the
milliseconds are copied for `get_wall_clock_timers`, and the timers begin at 0.  Gradients are reduced while backward
runs, so their time is in "bwd_inner" and "bwd_allreduce" stays near 0; the telemetry's breakdown separates it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, final

from torch import Tensor

from zengine.deepspeed.runtime.config import DeepSpeedConfig
from zengine.deepspeed.runtime.engine import EngineTimers
from zengine.deepspeed.utils.timer import SynchronizedWallClockTimer
from zengine.features import Feature

if TYPE_CHECKING:
    from zengine.config import Plan
    from zengine.engine.clock import MicroStep
    from zengine.step_report import StepReport

__all__ = ["EngineObjects", "WallClock"]


@final
class EngineObjects:
    """Objects of an engine that only `deepspeed.initialize` makes."""

    def __init__(self, plan: Plan) -> None:
        times_phases = plan.telemetry.wall_clock_breakdown
        self.plan = plan
        self.timers = SynchronizedWallClockTimer()
        self.engine_timers = EngineTimers(times_phases, times_phases or plan.profiling.flops.enabled)
        self.elapsed: dict[str, float] = {}  # ms of the last step, by timer

    @functools.cached_property
    def config(self) -> DeepSpeedConfig:
        """The config with DeepSpeed's attributes."""
        return DeepSpeedConfig.of(self.plan)


@final
class WallClock(Feature):
    """Starts and stops the timers of `objects`."""

    def __init__(self, objects: EngineObjects) -> None:
        self._objects, self._names = objects, objects.engine_timers

    def forward_begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._start(self._names.forward_timers)
        return args, kwargs

    def forward_end(self, output: Any) -> Any:
        self._stop(self._names.forward_timers)
        return output

    def backward_begin(self, micro: MicroStep, loss: Tensor) -> Tensor:
        self._start((*self._names.backward_timers, *self._names.backward_inner_timers))
        return loss

    def backward_end(self, micro: MicroStep) -> None:
        self._stop(self._names.backward_inner_timers)
        self._start(self._names.backward_reduce_timers)
        self._stop((*self._names.backward_reduce_timers, *self._names.backward_timers))

    def step_begin(self) -> None:
        self._start(self._names.step_timers)

    def step_end(self, report: StepReport) -> None:
        self._stop(self._names.step_timers)
        timers = self._objects.timers
        self._objects.elapsed = {name: timers(name).elapsed(reset=True) for name in self._names.active_timers()}

    def _start(self, names: Iterable[str]) -> None:
        for name in names:
            timer = self._objects.timers(name)
            if timer.started_:  # an error ended the call before
                timer.stop()
            timer.start()

    def _stop(self, names: Iterable[str]) -> None:
        for name in names:
            self._objects.timers(name).stop()
