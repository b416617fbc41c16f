"""Plans: the parameters of a group, sorted into batches that one kernel call updates.

Problem: the tensors of a kernel call have one device, one dtype and one memory layout; checking a thousand tensors in
Python takes longer than updating them.  Design: a plan is made once, with all checks, and a step only verifies that
nothing moved: the same objects at the same addresses.  New gradients of the same kind, which
`zero_grad(set_to_none=True)` causes at every step, only change the addresses; anything else makes a new plan.

Rejected: comparing objects alone.  `tensor.data = ...`, offloading and `module.to(...)` move the memory of an object,
and a kernel that writes to the old address would corrupt other tensors.
"""

from __future__ import annotations

import enum
import itertools
import operator
from array import array
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from zoptim.backends.contract import BLOCK_NUMEL, FORMAT_OF_DTYPE, Job, Streams
from zoptim.backends.memory import WrittenRanges, addresses, is_dense
from zoptim.states.spec import ALIKE, STEP

__all__ = [
    "Batch",
    "Entry",
    "Plan",
    "UpdatePath",
    "fallback_reason",
    "has_part_counts",
    "same_objects",
    "sort_entries",
]


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
    """Return whether the state has a step count for each part of a flat shard."""
    return STEP in state and bool(state[STEP].dim())


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
    entries: list[Entry]  # on the kernel path, with the gradients of the step that made the plan
    streams: Streams  # of the kernel path, with the gradients of the last step
    job: Job | None = None  # of the kernel path
    ranges: WrittenRanges | None = None  # the memory that the job writes
    grad_bytes: array[int] = attrs.field(factory=lambda: array("q"))  # sizes of the gradients

    def find_overlap(self) -> int | None:
        """Return the position of an entry whose gradient overlaps memory that the step writes, or None."""
        return None if self.ranges is None else self.ranges.find(addresses(self.streams.grads), self.grad_bytes)


@attrs.define(eq=False)
class Plan:
    """The batches of one group, and the tensors they were made from.

    A plan keeps its tensors alive, so an equal address means the same memory: addresses alone show whether a tensor
    was replaced or moved.
    """

    key: Hashable  # options that the batches depend on
    params: list[Tensor]
    grads: list[Tensor | None]
    batches: list[Batch]
    sources: list[dict[str, Any]]  # the states of parameters that have gradients
    states: list[dict[str, Any]]  # all states of the optimizer; a dropped or replaced one makes a new plan
    found: tuple[list[int], list[int]]  # addresses of parameters and of all their state
    kinds: tuple[list[Any], ...]  # of the gradients, see kinds_of
    grad_addresses: list[list[int]]  # per batch, of the last step

    @classmethod
    def make(
        cls,
        key: Hashable,
        params: list[Tensor],
        grads: list[Tensor | None],
        batches: list[Batch],
        states: Iterable[dict[str, Any]],
    ) -> Plan:
        entries = [entry for batch in batches for entry in batch.entries]
        sources = list({id(source): source for source in map(_source, entries)}.values())
        found = (addresses(params), _state_addresses(sources))
        now = [addresses(batch.streams.grads) for batch in batches]
        return cls(key, list(params), grads, batches, sources, list(states), found, kinds_of(grads), now)

    def is_current(self, key: Hashable, params: Sequence[Tensor], states: Iterable[dict[str, Any]]) -> bool:
        """Return whether the plan still describes the group, apart from gradients."""
        if key != self.key or not (same_objects(params, self.params) and same_objects(list(states), self.states)):
            return False
        return (addresses(params), _state_addresses(self.sources)) == self.found

    def use_grads(self, grads: list[Tensor | None], bind: Callable[[Batch], None]) -> bool:
        """Use the gradients of this step.  Return False if they are of another kind and a new plan is needed.

        `bind` is called for kernel batches whose gradients moved.
        """
        if not same_objects(grads, self.grads):
            if kinds_of(grads) != self.kinds:
                return False
            self.grads = grads
            for batch in self.batches:
                self._assign_grads(batch)
        for k, batch in enumerate(self.batches):
            now = addresses(batch.streams.grads)
            if batch.path is UpdatePath.KERNEL and now != self.grad_addresses[k]:
                bind(batch)
                self.grad_addresses[k] = now
        return True

    def _assign_grads(self, batch: Batch) -> None:
        fresh = [_part(self.grads[entry.index], entry.part) for entry in batch.entries]
        if batch.path is UpdatePath.KERNEL:
            batch.streams.grads[:] = fresh
        else:
            batch.entries = [attrs.evolve(entry, grad=grad) for entry, grad in zip(batch.entries, fresh)]


def same_objects(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


def _source(entry: Entry) -> dict[str, Any]:
    return entry.state if entry.part is None else entry.part.source


def _state_addresses(sources: Sequence[dict[str, Any]]) -> list[int]:
    try:
        return addresses(itertools.chain.from_iterable(map(dict.values, sources)))
    except TypeError:  # a user's entries that are not tensors
        values = itertools.chain.from_iterable(map(dict.values, sources))
        return addresses(value for value in values if isinstance(value, Tensor))


def fallback_reason(entry: Entry, device_reason: Callable[[torch.device], str | None]) -> str | None:
    """Return the reason why an entry has no kernel, for messages; None if it has one."""
    param, grad = entry.param, entry.grad
    if (reason := device_reason(param.device)) is not None:
        return reason
    for what, tensor in (("parameter", param), ("gradient", grad)):
        if tensor.dtype not in FORMAT_OF_DTYPE or not tensor.dtype.is_floating_point:
            return f"there is no kernel for a {what} of {tensor.dtype}"
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


def kinds_of(grads: Sequence[Tensor | None]) -> tuple[list[Any], ...]:
    """Return everything that a plan assumes about gradients except addresses.  Lists, because they compare fast."""
    present = [grad for grad in grads if grad is not None]
    return (
        [grad is None for grad in grads],
        [grad.dtype for grad in present],
        [grad.device for grad in present],
        [grad.shape for grad in present],
        [grad.stride() if grad.layout is torch.strided else grad.layout for grad in present],
    )
