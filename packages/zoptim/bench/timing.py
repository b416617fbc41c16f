"""Round-robin timing: A B C A B C, so that disturbances affect all contenders alike.

Caches are cold by default: before every timed call on a CPU all threads read unrelated memory.  In training a forward
and a backward separate two steps; a small model that stays in the cache between steps is an artifact of benchmarks,
which `is_warm` measures.  On a GPU calls are consecutive, as events require.

Slow contenders stop after their share of time, but not before `MIN_ROUNDS`; short calls are sampled more often.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from contenders import Step

__all__ = ["Samples", "Sampling", "count_launches", "in_graph", "run_rounds"]

MIN_ROUNDS = 3
SAMPLE_S = 0.005  # seconds of a turn, if calls are shorter,
MOST_CALLS = 200  # of warm calls, whose mean is a sample,
MOST_COLD_CALLS = 4  # or of cold ones, which are a sample each
COLD_BYTES = 2**28  # larger than a processor's caches


@attrs.frozen
class Samples:
    """Seconds per call, in the order of the rounds."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median."""
        return statistics.median(self.seconds)

    @property
    def least(self) -> float:
        """The minimum: the time without disturbance."""
        return min(self.seconds)


@attrs.frozen
class Sampling:
    """The settings of a measurement."""

    rounds: int = 15
    seconds: float = 2.0  # seconds after which a contender stops
    is_warm: bool = False  # caches are not flushed between calls
    patience: float = 0.0  # most seconds to wait for other processes to be idle, before a table


def run_rounds(steps: Mapping[str, Step], sampling: Sampling, device: torch.device) -> dict[str, Samples]:
    """Run all `steps` round by round; first a few calls of each, which create its plans and memory."""
    sample = _sampler(sampling, device)
    calls = {
        name: _calls_for(step, _timed_on_gpu if device.type == "cuda" else _timed) for name, step in steps.items()
    }
    taken: dict[str, list[float]] = {name: [] for name in steps}
    used = dict.fromkeys(steps, 0.0)
    gc.collect()
    gc.disable()
    try:
        for number in range(sampling.rounds):
            for name, step in steps.items():
                if number < MIN_ROUNDS or used[name] < sampling.seconds:
                    begin = time.perf_counter()
                    taken[name] += sample(step, calls[name])
                    used[name] += time.perf_counter() - begin
    finally:
        gc.enable()
    return {name: Samples(tuple(seconds)) for name, seconds in taken.items()}


def _sampler(sampling: Sampling, device: torch.device) -> Callable[[Step, int], list[float]]:
    """Return the function that takes the samples of one turn, from about the given number of calls."""
    if device.type == "cuda" or sampling.is_warm:
        timed = _timed_on_gpu if device.type == "cuda" else _timed

        def warm(step: Step, calls: int) -> list[float]:
            if calls > 1:
                step()
            return [timed(step, calls)]

        return warm

    stranger = torch.ones(COLD_BYTES // 4)

    def cold(step: Step, calls: int) -> list[float]:
        found = []
        for _ in range(min(calls, MOST_COLD_CALLS)):
            stranger.sum()  # by all threads of torch, which also wakes them
            found.append(_timed(step, 1))
        return found

    return cold


def _calls_for(step: Step, timed: Callable[[Step, int], float]) -> int:
    step()
    once = timed(step, 1)
    if once < SAMPLE_S:
        once = min(once, timed(step, 1), timed(step, 1))
    return max(1, min(MOST_CALLS, int(SAMPLE_S / max(once, 1e-9))))


def _timed(step: Step, calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        step()
    return (time.perf_counter() - begin) / calls


def _timed_on_gpu(step: Step, calls: int) -> float:
    """Time by events on the device; the host may run ahead, as in training."""
    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(calls):
        step()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / calls


def in_graph(step: Step) -> Step:
    """Return the replay of a CUDA graph of `step`, after a few calls, which capture requires."""
    new_stream: Any = torch.cuda.Stream
    stream = new_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def count_launches(step: Step) -> int:
    """Count the kernels that one call starts on the GPU, without copies and fills."""
    from torch.profiler import ProfilerActivity, profile

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    on_gpu = [event for event in seen.events() or [] if str(event.device_type).endswith("CUDA")]
    return sum(not event.name.lower().startswith(("memcpy", "memset")) for event in on_gpu)
