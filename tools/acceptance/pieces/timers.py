"""Telemetry's timers: events on the stream agree with a clock on the wall around synchronized work."""

from __future__ import annotations

import time

import torch

from acceptance.bench import Bench
from acceptance.verdict import Figure
from zengine.telemetry.instants import DeviceInstants

__all__ = ["run"]

AGREE = 0.05


def run(bench: Bench) -> None:
    """Time two pieces of work by events, and by the wall."""
    square = torch.ones(bench.choose(4096, 32), bench.choose(4096, 32), device=bench.device, dtype=torch.bfloat16)
    instants = DeviceInstants()

    def work() -> None:
        for _ in range(bench.choose(300, 3)):
            square @ square

    work()
    torch.cuda.synchronize()
    start = time.perf_counter()
    marks = []
    for _ in range(2):
        marks.append(instants.now())
        work()
    marks.append(instants.now())
    instants.synchronize()
    wall = (time.perf_counter() - start) * 1e3
    first, second, both = (instants.interval(marks[a], marks[b]).ms() for a, b in ((0, 1), (1, 2), (0, 2)))
    faults = [f"{name} is {ms} ms" for name, ms in (("the first", first), ("the second", second)) if not ms > 0]
    faults += [] if abs(first + second - both) < 1e-2 + 1e-3 * both else [f"{first} + {second} ms are not {both} ms"]
    bench.check("intervals are positive and add up", faults)
    name, low, high = "events beside the wall", 1 - AGREE, 1 + AGREE
    bench.figure(Figure(name=name, unit="ms", measured=both, peer=wall, at_least=low, at_most=high))
