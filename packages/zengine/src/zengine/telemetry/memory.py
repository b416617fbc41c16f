"""Memory of this process and, on CUDA, of the allocator, in bytes."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import final

import torch

from zengine.telemetry.spans import Observer

_STATUS = Path("/proc/self/status")
_SIZES, _PAGE_BYTES = Path("/proc/self/statm"), resource.getpagesize()
_FIELDS = {"VmRSS:": "process", "VmHWM:": "process_peak"}


def process_memory() -> dict[str, int]:
    """Return the resident bytes of this process: `process` now and `process_peak` since its start.

    Without /proc (not Linux) only the peak is known.  /proc is preferred for the peak too: `getrusage` inherits the
    peak of the parent process.
    """
    try:
        text = _read(_STATUS)
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"process_peak": peak if sys.platform == "darwin" else peak * 1024}
    words = text.split()
    return {kind: int(words[words.index(name) + 1]) * 1024 for name, kind in _FIELDS.items() if name in words}


def _read(path: Path) -> str:
    """Read a small file in one call, in a third of the time of Path.read_text."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 65536).decode()
    finally:
        os.close(descriptor)


def device_memory(device: torch.device) -> dict[str, int]:
    """Return the bytes in torch's CUDA allocator; empty on other devices."""
    if device.type != "cuda":
        return {}
    return {
        "cuda": torch.cuda.memory_allocated(device),
        "cuda_peak": torch.cuda.max_memory_allocated(device),
        "cuda_reserved": torch.cuda.memory_reserved(device),
    }


def read_memory(device: torch.device) -> dict[str, int]:
    """Return all known sizes by name."""
    return {**process_memory(), **device_memory(device)}


def current_bytes(device: torch.device) -> int:
    """Return the size that a phase changes: allocated on CUDA, resident elsewhere (0 if unknown)."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        return int(_read(_SIZES).split()[1]) * _PAGE_BYTES  # a tenth of the time that _STATUS takes
    except OSError:
        return 0


@final
class MemoryMarks:
    """Observes the phases and keeps the memory at the last end of each."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: dict[str, int] = {}

    def observers(self) -> tuple[Observer, ...]:
        return (self,)

    def phase_begin(self, name: str) -> None: ...

    def phase_end(self, name: str) -> None:
        self._marks[f"after_{name}"] = current_bytes(self._device)

    def read(self) -> dict[str, int]:
        return dict(self._marks)


@final
class NoMemoryMarks:
    """Null object: marks nothing."""

    def observers(self) -> tuple[Observer, ...]:
        return ()

    def read(self) -> dict[str, int]:
        return {}


OFTEN, SELDOM = 3, 100  # boundaries at the start that are all read, and the interval afterwards


@final
class Owners:
    """Memory by owner, from the partition's ledger.

    Counting visits every tensor, and sizes hardly change once the optimizer has its states.  So it runs at the first
    boundaries and every hundredth, or at all of them with `always` ("memory_breakdown").
    """

    def __init__(self, always: bool) -> None:
        self._every = 1 if always else SELDOM
        self._seen = 0  # boundaries
        self.ledger: Callable[[], Mapping[str, int]] = dict  # empty until the engine is complete

    def step_end(self) -> dict[str, int]:
        """Return the non-zero bytes by owner; empty at boundaries without a count."""
        self._seen += 1
        if self._seen > OFTEN and self._seen % self._every:
            return {}
        return {owner: size for owner, size in self.ledger().items() if size}
