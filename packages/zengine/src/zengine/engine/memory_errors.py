"""Out of memory: one named error with the owners of the memory, and the other ranks are told.

An allocator's message says how much it could not get, not who holds the rest or what to change, and the other ranks
wait in their next collective until the time-out.  So each verb of the engine turns such errors, of any allocator,
into `OutOfMemory`: the rank, the call, the amount, the bytes by owner (`Partition.ledger`), the limits that apply,
and the settings of this config to change, in order.  The reason is published (`zcomm.abort`), so that the others
raise it within seconds; if all ranks run out of memory together, none is told, and a program may try a smaller batch.

`OutOfMemory` is a torch.OutOfMemoryError and a MemoryError, and its text holds the allocator's, so code that looks
for either (a search for the largest batch) finds it.
"""

from __future__ import annotations

import errno
import functools
import re
import resource
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

import zcomm
from zengine.pages import Page, explained

if TYPE_CHECKING:
    from zengine.engine.parts import Run

__all__ = ["OutOfMemory", "advice", "explains_memory", "is_out_of_memory", "wanted_bytes"]

F = TypeVar("F", bound=Callable[..., Any])

_SIGNS = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|bad_alloc|unable to allocate|ALLOC_FAILED|"
    r"can't start new thread|no memory for",
    re.IGNORECASE,
)
_WANTED = re.compile(r"(?:allocate|allocate memory: you tried to allocate) (\d+(?:\.\d+)?) ?(bytes|[KMGT]?i?B)")
_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_CGROUP = Path("/sys/fs/cgroup")


@explained(Page.OUT_OF_MEMORY)
class OutOfMemory(torch.OutOfMemoryError, MemoryError):
    """A rank ran out of memory.  The message has the amount, the owners of the memory, and what to change."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True for the errors of allocators: Python's, torch's, CuPy's, the system's."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and bool(_SIGNS.search(str(error)))


def wanted_bytes(text: str) -> int:
    """Return the bytes that an allocator's message says were wanted; 0 if it does not say."""
    found = _WANTED.search(text)
    return int(float(found[1]) * _UNITS.get(found[2], 1)) if found else 0


def explains_memory(call: str, *, votes: bool = False) -> Callable[[F], F]:
    """Return a decorator of a method of the engine: errors of allocators become `OutOfMemory`.

    call: the method as users call it, for the message.
    votes: the ranks of the call tell each other how it ended, and may go on; else the others are told here.
    """

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def explained(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except (MemoryError, RuntimeError, OSError) as error:
                if isinstance(error, (OutOfMemory, zcomm.CollectiveFailed)) or not is_out_of_memory(error):
                    raise
                raise report(error, call, self._run, tells=not votes) from error

        return explained  # type: ignore[return-value]

    return decorate


def report(error: BaseException, call: str, run: Run, *, tells: bool = True) -> OutOfMemory:
    """Return the named error, and tell the other ranks if `tells`."""
    place = f"rank {run.parts.world.rank} ran out of memory in {call} {run.clock.position}"
    found = describe(error, place, run.parts.partition.ledger, run.device, lambda: advice(run.plan))
    if tells:
        zcomm.abort(f"{str(found).splitlines()[0]}; see its message for what to change", unless_all=True)
    return found


def describe(
    error: BaseException,
    place: str,
    ledger: Callable[[], Mapping[str, int]],
    device: torch.device,
    changes: Callable[[], list[str]],
) -> OutOfMemory:
    """Return the named error; a part of the message that itself needs too much memory is left out."""
    original = " ".join(str(error).split()) or type(error).__name__
    wanted = wanted_bytes(original)
    amount = f": it wanted {_size(wanted)} more" if wanted else ""
    lines = [f"{place}{amount} [{original[:300]}]"]
    sections: tuple[tuple[str, Callable[[], list[str]]], ...] = (
        ("Memory of this rank by owner (the rest is activations and temporary tensors):", lambda: _owners(ledger())),
        ("Limits:", lambda: [f"{name}: {value}" for name, value in limits(device).items()]),
        ("To need less, in this order:", changes),
    )
    for title, make in sections:
        try:
            lines += [title, *(f"  {line}" for line in make())]
        except (MemoryError, RuntimeError, OSError):
            continue
    lines.append("`zengine plan` predicts the memory of a config before it runs.")
    return OutOfMemory("\n".join(lines))


def _owners(ledger: Mapping[str, int]) -> list[str]:
    """Format the bytes by owner, the largest first."""
    held = sorted(((size, owner) for owner, size in ledger.items() if size), reverse=True)
    return [f"{owner}: {_size(size)}" for size, owner in held]


def limits(device: torch.device) -> dict[str, str]:
    """Return what the process holds and may hold, as text by name."""
    found = {}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        found["all tensors on the device"] = _size(torch.cuda.memory_allocated(device))
        found["cached by torch's allocator"] = _size(torch.cuda.memory_reserved(device))
        found["free on the device"] = f"{_size(free)} of {_size(total)}"
    status = dict(_pairs(Path("/proc/self/status")))
    for name, key in (("the process, resident", "VmRSS"), ("the process, virtual", "VmSize")):
        if key in status:
            found[name] = _size(int(status[key].split()[0]) * 1024)
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    if soft != resource.RLIM_INFINITY:
        found["limit of virtual memory (ulimit -v)"] = _size(soft)
    limit, used = (_number(_CGROUP / name) for name in ("memory.max", "memory.current"))
    if limit:
        found["limit of the container (memory.max)"] = f"{_size(limit)}, of which {_size(used)} are used"
    available = dict(_pairs(Path("/proc/meminfo"))).get("MemAvailable", "").split()
    if available:
        found["available on this host"] = _size(int(available[0]) * 1024)
    return found


def advice(plan: Any) -> list[str]:
    """Return the settings of `plan` to change, those that cost the least first."""
    batch, zero = plan.batch, plan.zero
    lines = []
    if batch.micro_batch_size > 1:
        smaller = batch.micro_batch_size // 2
        lines.append(
            f'"train_micro_batch_size_per_gpu": {smaller} instead of {batch.micro_batch_size}, and '
            f'"gradient_accumulation_steps": {-(-batch.accumulation * batch.micro_batch_size // smaller)}: '
            "half the activations for the same step"
        )
    lines.append("activation checkpointing of the model's blocks (model.gradient_checkpointing_enable()): recompute")
    if zero.stage < 3 and batch.replicas > 1:
        shards = {0: "the optimizer state", 1: "the gradients", 2: "the weights"}[int(zero.stage)]
        higher = int(zero.stage) + 1
        lines.append(f'"zero_optimization": {{"stage": {higher}}} instead of {higher - 1}: shards {shards}')
    if plan.offloads.get("offload_optimizer", "none") == "none" and plan.optimizer.type:
        lines.append('"zero_optimization": {"offload_optimizer": {"device": "cpu"}} (or "nvme"): moves the optimizer')
    if plan.precision.param == torch.float32:
        lines.append('"bf16": {"enabled": true}: half the activations')
    if plan.checkpoint.async_save:
        lines.append('"checkpoint": {"async_save": false}: no copy of the state in host memory')
    return lines


def _pairs(path: Path) -> Iterator[tuple[str, str]]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        key, colon, value = line.partition(":")
        if colon:
            yield key, value.strip()


def _number(path: Path) -> int:
    try:
        text = path.read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdigit() else 0


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:,.2f} MiB"
