"""What one rank measures: a contender that trains, and the floors.  A module of its own, because ranks import it."""

from __future__ import annotations

import ctypes
import gc
import statistics
import threading
import time
from pathlib import Path

import attrs
import contenders
import models
import torch

import zcomm
import zoptim

__all__ = ["Sample", "Setting", "floors", "measure"]


@attrs.frozen(kw_only=True)
class Setting:
    """What all contenders share."""

    shape: models.Shape
    bf16: bool
    micro_batch: int
    tokens: int
    steps: int


@attrs.frozen(kw_only=True)
class Sample:
    """One contender in one round, on rank 0."""

    forward_ms: float
    backward_ms: float
    step_ms: float
    peak_mib: float  # memory gained over that before it was made, at most, in a step


def measure(name: str, setting: Setting) -> Sample:
    """Build a contender on this rank, warm it up, train it."""
    torch.set_num_threads(1)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the one before has freed is not this one's to reuse unseen
    before = _pss_mib()
    forward, backward, step, close = contenders.CONTENDERS[name](setting.shape, setting.bf16)
    times: list[tuple[float, float, float]] = []
    for index in range(setting.steps + 3):
        peak = _Peak() if index == setting.steps + 2 else None  # looking costs time: in the last step, not counted
        tokens = models.batch(setting.shape, setting.micro_batch, setting.tokens, index * 97 + zcomm.group_rank())
        zcomm.barrier()
        began = time.perf_counter()
        loss = forward(tokens)
        forwarded = time.perf_counter()
        backward(loss)
        backwarded = time.perf_counter()
        step()
        ended = time.perf_counter()
        times.append((forwarded - began, backwarded - forwarded, ended - backwarded))
    assert peak is not None
    peak_mib = peak.stop() - before
    close()
    medians = [1e3 * statistics.median(column) for column in zip(*times[2:-1])]
    return Sample(forward_ms=medians[0], backward_ms=medians[1], step_ms=medians[2], peak_mib=peak_mib)


def floors(setting: Setting) -> dict[str, float]:
    """ms for what stage 2 must do beside the arithmetic: exchange, and update this rank's share."""
    torch.set_num_threads(1)
    world = zcomm.group_size()
    dtype = torch.bfloat16 if setting.bf16 else torch.float32
    numel = sum(p.numel() for p in models.make(setting.shape).parameters()) // world * world
    flat = zcomm.shared_empty(numel, dtype)
    own = flat.chunk(world)[zcomm.group_rank()]
    master = torch.zeros(numel // world, requires_grad=True)
    master.grad = torch.zeros(numel // world)
    optimizer = zoptim.AdamW([master])

    def exchange() -> None:
        zcomm.reduce_scatter(own, flat)
        zcomm.all_gather(flat, own)

    def update() -> None:
        zoptim.grad_stats([master.grad])
        optimizer.step()

    found = {}
    for name, work in (("exchange", exchange), ("update", update)):
        samples = []
        for _ in range(7):
            zcomm.barrier()
            began = time.perf_counter()
            work()
            samples.append(1e3 * (time.perf_counter() - began))
        found[name] = statistics.median(samples[2:])
    return found


class _Peak:
    """The most memory while it runs, looked at every 20 ms."""

    def __init__(self) -> None:
        self._most, self._done = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def stop(self) -> float:
        """MiB."""
        self._done.set()
        self._thread.join()
        return self._most

    def _look(self) -> None:
        while not self._done.wait(0.02):
            self._most = max(self._most, _pss_mib())


def _pss_mib() -> float:
    """Resident memory of this process, where what n processes share counts 1/n for each."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024
