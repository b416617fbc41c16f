"""`deepspeed.utils.timer`: timers for a training loop of one's own.  The engine's times are telemetry's.

Times of a `SynchronizedWallClockTimer` are in milliseconds: of CUDA events on a GPU, else of the host's clock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import numpy as np

from zengine.deepspeed.accelerator.real_accelerator import get_accelerator
from zengine.deepspeed.utils.logging import print_dist

__all__ = [
    "BACKWARD_GLOBAL_TIMER",
    "BACKWARD_INNER_GLOBAL_TIMER",
    "BACKWARD_INNER_MICRO_TIMER",
    "BACKWARD_MICRO_TIMER",
    "BACKWARD_REDUCE_GLOBAL_TIMER",
    "BACKWARD_REDUCE_MICRO_TIMER",
    "FORWARD_GLOBAL_TIMER",
    "FORWARD_MICRO_TIMER",
    "STEP_GLOBAL_TIMER",
    "STEP_MICRO_TIMER",
    "TIME_EPSILON",
    "CudaEventTimer",
    "NoopTimer",
    "SynchronizedWallClockTimer",
    "ThroughputTimer",
    "trim_mean",
]

FORWARD_MICRO_TIMER = "fwd_microstep"
FORWARD_GLOBAL_TIMER = "fwd"
BACKWARD_MICRO_TIMER = "bwd_microstep"
BACKWARD_GLOBAL_TIMER = "bwd"
BACKWARD_INNER_MICRO_TIMER = "bwd_inner_microstep"
BACKWARD_INNER_GLOBAL_TIMER = "bwd_inner"
BACKWARD_REDUCE_MICRO_TIMER = "bwd_allreduce_microstep"
BACKWARD_REDUCE_GLOBAL_TIMER = "bwd_allreduce"
STEP_MICRO_TIMER = "step_microstep"
STEP_GLOBAL_TIMER = "step"
TIME_EPSILON = 1e-6

_GIB = 2**30
log = logging.getLogger("zengine")


@final
class CudaEventTimer:
    """Time between two recorded events."""

    def __init__(self, start_event: Any, end_event: Any) -> None:
        self.start_event, self.end_event = start_event, end_event

    def get_elapsed_msec(self) -> float:
        """Wait for the second event; return the milliseconds between them."""
        get_accelerator().current_stream().wait_event(self.end_event)
        self.end_event.synchronize()
        return float(self.start_event.elapsed_time(self.end_event))


class _Timer:
    """One timer: intervals between start() and stop()."""

    def __init__(self, name: str) -> None:
        self.name_ = name
        self.started_ = False
        self.use_host_timer = get_accelerator().use_host_timers()
        self.event_timers: list[Any] = []  # seconds on the host, or CudaEventTimers
        self.elapsed_records: list[float] | None = None  # ms of each interval; None: not computed yet
        self.start_time = self.end_time = 0.0  # host, seconds
        self.start_event: Any = None

    def start(self) -> None:
        """Begin an interval.  Raises AssertionError (DeepSpeed's) if one is running."""
        assert not self.started_, f"{self.name_} timer has already been started"
        if self.use_host_timer:
            self.start_time = time.time()
        else:
            self.start_event = self._recorded()
        self.started_ = True

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """End the interval; both arguments are ignored, as in DeepSpeed.

        Raises AssertionError (DeepSpeed's) if none is running.
        """
        assert self.started_, "timer is not started"
        if self.use_host_timer:
            self.end_time = time.time()
            self.event_timers.append(self.end_time - self.start_time)
        else:
            self.event_timers.append(CudaEventTimer(self.start_event, self._recorded()))
            self.start_event = None
        self.started_ = False

    def reset(self) -> None:
        """Forget all intervals, and a running one."""
        self.started_, self.start_event, self.elapsed_records = False, None, None
        self.event_timers.clear()

    def elapsed(self, reset: bool = True) -> float:
        """Return the milliseconds of all intervals; a running one ends here, and another begins."""
        was_running = self.started_
        if was_running:
            self.stop()
        total = self._sum()
        if reset:
            self.reset()
        if was_running:
            self.start()
        return total

    def mean(self) -> float:
        """Return the mean of the intervals in milliseconds, without the shortest and the longest tenth."""
        self.elapsed(reset=False)
        return trim_mean(self.elapsed_records or [], 0.1)

    def _sum(self) -> float:
        on_host = self.use_host_timer
        self.elapsed_records = [each * 1e3 if on_host else each.get_elapsed_msec() for each in self.event_timers]
        return sum(self.elapsed_records)

    def _recorded(self) -> Any:
        event = get_accelerator().Event(enable_timing=True)
        event.record()
        return event


@final
class SynchronizedWallClockTimer:
    """Named timers: `timers("fwd").start()`, `timers("fwd").stop()`, `timers.log(["fwd"])`."""

    Timer = _Timer

    def __init__(self) -> None:
        self.timers: dict[str, _Timer] = {}

    def get_timers(self) -> dict[str, _Timer]:
        return self.timers

    def __call__(self, name: str) -> _Timer:
        if name not in self.timers:
            self.timers[name] = self.Timer(name)
        return self.timers[name]

    @staticmethod
    def memory_usage() -> str:
        """Return a line with the allocated and reserved memory, and their peaks."""
        device = get_accelerator()
        amounts = {
            "mem_allocated": device.memory_allocated(),
            "max_mem_allocated": device.max_memory_allocated(),
            "cache_allocated": device.memory_cached(),
            "max_cache_allocated": device.max_memory_cached(),
        }
        return "".join(f" | {name}: {nbytes / _GIB:.4f} GB" for name, nbytes in amounts.items())

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Print the milliseconds of these timers, divided by `normalizer`, on `ranks` (default: 0).

        Names without a timer are left out.  memory_breakdown: ignored, as in DeepSpeed.
        """
        assert normalizer > 0.0, "normalizer must be positive"
        known = [name for name in names if name in self.timers]
        times = [f" | {name}: {self.timers[name].elapsed(reset=reset) / normalizer:.2f}" for name in known]
        print_dist("".join(["time (ms)", *times]), ranks=ranks or [0])

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Return the means in microseconds, divided by `normalizer`, of those names that have a timer."""
        assert normalizer > 0.0, "normalizer must be positive"
        return {name: self.timers[name].mean() * 1000.0 / normalizer for name in names if name in self.timers}


@final
class NoopTimer:
    """Null object: times nothing."""

    class Timer:
        """Timer that is always 0."""

        def start(self) -> None: ...

        def reset(self) -> None: ...

        def stop(self, **kwargs: Any) -> None: ...

        def elapsed(self, **kwargs: Any) -> float:
            return 0

        def mean(self) -> float:
            return 0

    def __init__(self) -> None:
        self.timer = self.Timer()

    def __call__(self, name: str) -> Timer:
        return self.timer

    def get_timers(self) -> dict[str, Any]:
        return {}

    def log(self, names: Iterable[str], *args: Any, **kwargs: Any) -> None: ...

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> None: ...


@final
class ThroughputTimer:
    """Samples per second of a loop: start() before a micro-step, stop(global_step=...) after it.

    config: any object with `enabled` and `synchronized` (wait for the device before reading the clock).
    batch_size: samples of a step.  start_step: steps that are not timed.
    steps_per_output: steps between two lines; None: no lines.  logging_fn: takes a line; default: the logger's info.
    """

    def __init__(
        self,
        config: Any,
        batch_size: int | None,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], Any] | None = None,
    ) -> None:
        self.config = config
        self.batch_size = 1 if batch_size is None else batch_size
        self.start_step = start_step
        self.steps_per_output = steps_per_output
        self.monitor_memory = monitor_memory
        self.logging = logging_fn or log.info
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.start_time = self.end_time = 0.0
        self.total_elapsed_time = self.step_elapsed_time = 0.0  # seconds
        self.started = self.initialized = False

    def update_epoch_count(self) -> None:
        """Count an epoch; micro-steps begin at 0."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        if not self.config.enabled:
            return
        self.initialized = self.started = True
        if self.global_step_count >= self.start_step:
            self.start_time = self._now()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """End a micro-step; global_step: it was the last one of a step."""
        if not self.config.enabled or not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        self.global_step_count += global_step
        if self.start_time <= 0:
            return
        self.end_time = self._now()
        self.total_elapsed_time += self.end_time - self.start_time
        self.step_elapsed_time += self.end_time - self.start_time
        if global_step:
            if report_speed and self._is_report_boundary():
                self._report()
            self.step_elapsed_time = 0.0

    def avg_samples_per_sec(self) -> float:
        """Return the samples per second of the timed steps; -inf before the first step ends."""
        if self.global_step_count <= 0:
            return float("-inf")
        return self.batch_size / (self.total_elapsed_time / (self.global_step_count - self.start_step))

    def _now(self) -> float:
        if self.config.synchronized:
            get_accelerator().synchronize()
        return time.time()

    def _is_report_boundary(self) -> bool:
        return self.steps_per_output is not None and self.global_step_count % self.steps_per_output == 0

    def _report(self) -> None:
        device = get_accelerator()
        steps = f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={self.global_step_count}, "
        rates = (
            f"RunningAvgSamplesPerSec={self.avg_samples_per_sec()}, "
            f"CurrSamplesPerSec={self.batch_size / (self.step_elapsed_time + TIME_EPSILON)}, "
        )
        memory = (device.memory_allocated() / _GIB, device.max_memory_allocated() / _GIB)
        self.logging(f"{steps}{rates}MemAllocated={memory[0]:.2f}GB, MaxMemAllocated={memory[1]:.2f}GB")
        if self.monitor_memory:
            used = 100 - 100 * device.available_memory() / device.total_memory()
            self.logging(f"{steps}vm %: {used:.1f}")


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """Return the mean of `data` without the lowest and highest `trim_percent` (0 to 1) of it; 0 of no data.

    A fraction that removes everything gives nan.
    """
    assert 0.0 <= trim_percent <= 1.0, "trim_percent is a fraction from 0 to 1"
    cut = round(len(data) * trim_percent)
    return float(np.mean(sorted(data)[cut : len(data) - cut])) if len(data) else 0
