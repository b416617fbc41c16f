"""Measured peak of real steps in this process, to verify a plan.

On CUDA it is the allocator's count.  On the CPU it is the kernel's: the maximum of this process's resident anonymous
and shared pages (RssAnon + RssShmem) during one warm step, which includes scratch memory of kernels.  Pages of
libraries are excluded, since they load whenever code first runs.  mallopt makes glibc return freed blocks above
64 KiB at once; otherwise it keeps them, and the figure would depend on the history of the process.

Rejected: sums of live tensors (they agree with the plan by construction); a sampling thread (misses short peaks).
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn

from zengine.config import BatchPlan, OptimizerPlan, Plan
from zengine.data.tree import map_tensors
from zengine.planning.activations import call_model, loss_of

__all__ = ["CannotMeasure", "Measured", "measure", "single_process_plan"]

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_ROLLUP = Path("/proc/self/smaps_rollup")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _BLOCK = -1, -3, 1 << 16  # of glibc's mallopt; bytes
_WARM_STEPS = 2  # allocate buffers and states, learn the order of use


class CannotMeasure(RuntimeError):
    """System that does not report the peak of a process."""


@attrs.frozen(kw_only=True)
class Measured:
    """Bytes above those of the process before the model existed."""

    peak: int  # maximum during a warm step
    between_steps: int  # after that step


def measure(
    make: Callable[[], nn.Module],
    batch: Callable[[int], Any],
    start: Callable[[nn.Module], Any],
    *,
    micro_batch: int,
    device: str,
) -> Measured:
    """Train a fresh model for a few steps and return the peak of the last.

    start: makes an engine for a model.  Raises CannotMeasure if the system does not report the peak.
    """
    meter = _CudaMeter() if device == "cuda" else _ResidentMeter()
    before = meter.current()
    engine = start(make())
    try:
        for index in range(_WARM_STEPS + 1):
            if index == _WARM_STEPS:
                meter.reset()
            for _ in range(engine.gradient_accumulation_steps()):
                given = map_tensors(batch(micro_batch), lambda tensor: tensor.to(device))
                output = call_model(engine, given)
                engine.backward(loss_of(output))
                del output, given
                engine.step()
        return Measured(peak=meter.peak() - before, between_steps=meter.current() - before)
    finally:
        engine.close()


def single_process_plan(plan: Plan) -> Plan:
    """Return the plan of the same micro-steps for one process; a missing optimizer becomes AdamW."""
    batch = plan.batch
    own = BatchPlan(
        train_batch_size=batch.micro_batch_size * batch.accumulation,
        micro_batch_size=batch.micro_batch_size,
        accumulation=batch.accumulation,
        replicas=1,
    )
    zero = attrs.evolve(plan.zero, shard_group_size=0, gradient_hop_size=0, secondary_group_size=0)
    optimizer = plan.optimizer if plan.optimizer.type else OptimizerPlan(type="AdamW")
    return attrs.evolve(plan, batch=own, zero=zero, optimizer=optimizer)


class _CudaMeter:
    """Peak of torch's allocator."""

    def current(self) -> int:
        gc.collect()
        return torch.cuda.memory_allocated()

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()


class _ResidentMeter:
    """Peak of this process's pages, counted by the kernel."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        try:
            libc.mallopt(_M_MMAP_THRESHOLD, _BLOCK)
            libc.mallopt(_M_TRIM_THRESHOLD, _BLOCK)
        except AttributeError:
            raise CannotMeasure(
                "this C library has no mallopt: the peak of a process can be measured only on Linux with glibc"
            ) from None
        self._libc = libc
        if not _STATUS.exists():
            raise CannotMeasure("there is no /proc/self/status: the peak of a process can be measured only on Linux")

    def current(self) -> int:
        gc.collect()
        self._libc.malloc_trim(0)
        found = _read_sizes(_STATUS)
        return found["RssAnon"] + found["RssShmem"] - _shared_elsewhere(found)

    def reset(self) -> None:
        try:
            _RESET.write_text("5")
        except OSError as error:
            raise CannotMeasure(f"the peak of this process cannot be reset ({error})") from None

    def peak(self) -> int:
        found = _read_sizes(_STATUS)
        return found["VmHWM"] - found["RssFile"] - _shared_elsewhere(found)


def _read_sizes(path: Path) -> dict[str, int]:
    """Return the sizes in a /proc file, in bytes."""
    words = (line.split() for line in path.read_text().splitlines() if line.endswith(" kB"))
    return {name.rstrip(":"): int(size) * 1024 for name, size, _ in words}


def _shared_elsewhere(found: dict[str, int]) -> int:
    """Return the bytes of shared pages that other ranks of this host account for."""
    try:
        return max(0, found["RssShmem"] - _read_sizes(_ROLLUP)["Pss_Shmem"])
    except (OSError, KeyError):  # an old kernel: count shared pages in full
        return 0
