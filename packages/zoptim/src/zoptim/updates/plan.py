"""Plans: the parameters of a group, sorted into batches that one kernel call updates.

Problem: the tensors of a kernel call have one device, one dtype and one memory layout; checking a thousand tensors in
Python takes longer than updating them.  Design: a plan is made once, with all checks, and a step only verifies that
nothing moved: the same objects at the same addresses (`backends/watch.py`).  New gradients of the same kind, which
`zero_grad(set_to_none=True)` causes at every step, only change the addresses; anything else makes a new plan.

Rejected: comparing objects alone.  `tensor.data = ...`, offloading and `module.to(...)` move the memory of an object,
and a kernel that writes to the old address would corrupt other tensors.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from zoptim.backends.contract import BLOCK_NUMEL, FORMAT_OF_DTYPE, Job
from zoptim.backends.memory import WrittenRanges, is_dense
from zoptim.backends.watch import GradTrace
from zoptim.states.spec import ALIKE, STEP

__all__ = [
    "Batch",
    "Entry",
    "Plan",
    "UpdatePath",
    "fallback_reason",
    "has_part_counts",
    "sort_entries",
]


ALL = (-1, 0)  # the place of all gradients of a group, in order


class UpdatePath(enum.Enum):
    """The implementation that updates a batch; results agree, costs differ."""

    KERNEL = "kernel"  # one pass over memory
    TORCH = "torch"  # several passes and temporaries; reads found_inf on the host


@attrs.frozen(eq=False)
class Entry:
    """One parameter, or a part of a flat shard, with the tensors that its update reads and writes."""

    param: Tensor  # any shape, floating
    grad: Tensor  # the parameter's shape
    state: dict[str, Any]  # the optimizer's, by torch's names
    index: int  # position in the group
    copy: Tensor | None = None  # receives the new weight, rounded
    part: Part | None = None  # of a flat shard; None is a whole parameter

    @property
    def grad_offset(self) -> int:
        """Bytes from the beginning of the parameter's gradient."""
        return 0 if self.part is None else self.part.row.start * self.grad.element_size()

    def at(self, row: slice, tensor: int, shape: tuple[int, ...] = (-1,), position: int = 0) -> Entry:
        """Return the entry of the elements `row`, in memory order: part number `position`, of tensor `tensor`."""

        def cut(value: Any) -> Any:
            is_large = isinstance(value, Tensor) and value.shape == self.param.shape
            return value.detach().view(-1)[row].view(shape) if is_large else value

        state = {key: cut(value) for key, value in self.state.items() if key != ALIKE}
        if has_part_counts(state):
            state[STEP] = state[STEP][position]
        for key in [key for key in state if key.endswith("_scale")]:
            state[key] = state[key][row.start // BLOCK_NUMEL : -(-row.stop // BLOCK_NUMEL)]
        part = Part(row, shape, tensor, self.state)
        return Entry(cut(self.param), cut(self.grad), state, self.index, cut(self.copy), part)


def has_part_counts(state: Mapping[str, Any]) -> bool:
    """Return whether the state has a step count for each of several parts of a flat shard."""
    return STEP in state and state[STEP].numel() != 1


@attrs.frozen(eq=False)
class Part:
    """The position of an entry in a flat shard."""

    row: slice  # of the shard's elements
    shape: tuple[int, ...]  # of the views of these elements
    tensor: int  # index of the tensor in the model
    source: dict[str, Any]  # the state of the whole shard


@attrs.define(eq=False)
class Batch:
    """Entries of one group that share path, device and dtypes."""

    path: UpdatePath
    entries: list[Entry]  # on the kernel path, their gradients are released
    job: Job | None = None  # of the kernel path
    ranges: WrittenRanges | None = None  # the memory that the job writes
    grad_bytes: array[int] = attrs.field(factory=lambda: array("q"))  # sizes of the gradients
    grad_places: list[tuple[int, int]] = attrs.field(factory=list)  # index in the group and offset of each gradient

    def grad_addresses(self, found: array[int]) -> array[int]:
        """Return the address of each entry's gradient, given those of the group's parameters."""
        if not self.grad_places:
            self.grad_places = [(entry.index, entry.grad_offset) for entry in self.entries]
            if self.grad_places == [(index, 0) for index in range(len(found))]:
                self.grad_places = [ALL]
        if self.grad_places == [ALL]:
            return found
        return array("Q", [found[index] + offset for index, offset in self.grad_places])

    def find_overlap(self, grads: array[int]) -> int | None:
        """Return the position of an entry whose gradient overlaps memory that the step writes, or None."""
        return None if self.ranges is None else self.ranges.find(grads, self.grad_bytes)

    def release_grads(self) -> None:
        """Keep no gradient alive: the job knows their addresses."""
        self.entries = [attrs.evolve(entry, grad=entry.grad.new_empty(0)) for entry in self.entries]

    def assign_grads(self, grads: Sequence[Tensor | None]) -> None:
        """Use other tensors, of the same kinds, on the torch path."""
        self.entries = [attrs.evolve(entry, grad=_part(grads[entry.index], entry.part)) for entry in self.entries]


@attrs.define(eq=False)
class Plan:
    """The batches of one group, and the gradients they were made for."""

    key: Hashable  # what the batches depend on, made of options
    options: list[Any]  # of the group at the last step, without parameters and rates
    batches: list[Batch]
    weights: list[Tensor]  # for each parameter, the tensor whose gradient is read if it has none
    grads: GradTrace
    is_reusable: bool  # False: it reads copies of gradients, which every step makes


def fallback_reason(entry: Entry, device_reason: Callable[[torch.device], str | None]) -> str | None:
    """Return the reason why an entry has no kernel, for messages; None if it has one."""
    param, grad = entry.param, entry.grad
    if (reason := device_reason(param.device)) is not None:
        return reason
    for what, tensor in (("parameter", param), ("gradient", grad)):
        if tensor.dtype not in FORMAT_OF_DTYPE or not tensor.dtype.is_floating_point:
            return f"there is no kernel for a {what} of {tensor.dtype}"
        if tensor.numel() and not tensor.data_ptr():
            return f"a {what} of type {type(tensor).__name__} has no address for a kernel"
    if not is_dense(param):
        return "its elements are not dense in memory"
    for key, value in entry.state.items():
        if isinstance(value, Tensor) and value.dim() and value.device != param.device:
            return f"its state {key} is on {value.device}, the parameter on {param.device}"
    return None


def sort_entries(
    entries: Sequence[Entry], path_of: Callable[[Entry], UpdatePath]
) -> list[tuple[UpdatePath, list[Entry]]]:
    """Group entries by path, device and all dtypes; the order inside each group is kept."""
    bins: dict[Any, list[Entry]] = {}
    for entry in entries:
        kinds = tuple((key, _kind(value)) for key, value in entry.state.items())
        key = (path_of(entry), entry.param.device, entry.param.dtype, entry.grad.dtype, _kind(entry.copy), kinds)
        bins.setdefault(key, []).append(entry)
    return [(key[0], members) for key, members in bins.items()]


def _kind(value: Any) -> Any:
    return (value.dtype, value.device) if isinstance(value, Tensor) else None


def _part(grad: Tensor | None, part: Part | None) -> Tensor:
    assert grad is not None
    return grad if part is None else grad.view(-1)[part.row].view(part.shape)
