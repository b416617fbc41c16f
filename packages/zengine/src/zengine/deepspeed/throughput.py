"""`engine.tput_timer`: DeepSpeed's timer of samples per second, driven by the engine's calls.

An interval goes from a forward in training mode to the next one, or to the end of the step.  The device is not waited
for: on a GPU single intervals are those of the host, and averages over steps are right.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from zengine.deepspeed.utils.timer import ThroughputTimer
from zengine.engine.parts import Run
from zengine.features import Feature
from zengine.step_report import StepReport

__all__ = ["Throughput"]


class Throughput(Feature):
    """Runs `throughput_timer`, a ThroughputTimer."""

    def __init__(self, batch_size: int) -> None:
        self.throughput_timer = ThroughputTimer(SimpleNamespace(enabled=True, synchronized=False), batch_size)

    def attach(self, run: Run) -> None:
        self._module = run.module

    def forward_begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Begin an interval, and end the one before: that of a micro-step that was not the last of its step."""
        if self._module.training:
            self.throughput_timer.stop()
            self.throughput_timer.start()
        return args, kwargs

    def step_end(self, report: StepReport) -> None:
        self.throughput_timer.stop(global_step=True, report_speed=False)
