"""An update without a kernel: the pure rule, tensor by tensor, whatever the formats.

The same text is the oracle of the kernels, so what is slow here is at least right: any device, any layout, float64.
Low-precision weights and moments are read as float32, updated and rounded back with the kernels' own noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from zoptim.backends.signals import Signals
from zoptim.states import formats
from zoptim.states.spec import STEP, StateSpec
from zoptim.updates.plan import Entry

__all__ = [
    "HasRule",
    "count_update",
    "divided_gradient",
    "is_plain",
    "next_step",
    "update_in_torch",
    "write_back",
]


class HasRule(Protocol):
    """What the fallback asks of an optimizer."""

    def _state_spec(self, group: Mapping[str, Any]) -> StateSpec: ...

    def _evaluate(
        self, group: Mapping[str, Any], param: Tensor, grad: Tensor, moments: dict[str, Tensor], step: int
    ) -> tuple[Tensor, dict[str, Tensor]]: ...


def update_in_torch(optimizer: HasRule, group: Mapping[str, Any], entries: Sequence[Entry], signals: Signals) -> None:
    """Update `entries`, none of them skipped."""
    memory = optimizer._state_spec(group)
    for entry in entries:
        step = next_step(entry)
        weight = memory.read_weight(entry.param, entry.state)
        grad = divided_gradient(entry, weight.dtype, signals)
        moments = {name: memory.read(entry.state, name) for name in memory.names if name in entry.state}
        new, after = optimizer._evaluate(group, weight, grad, moments, step)
        write_back(memory, entry, new, after, step)
    count_update(entries)


def next_step(entry: Entry) -> int:
    """The number of the update that comes, the highest of a shard's parts; 1 where none is counted."""
    count = entry.state.get(STEP)
    return 1 if count is None else int(count.max()) + 1


def count_update(entries: Sequence[Entry]) -> None:
    """Advance the counts of entries by one update; parts of one shard share theirs."""
    for count in {id(entry.state[STEP]): entry.state[STEP] for entry in entries if STEP in entry.state}.values():
        count += 1


def divided_gradient(entry: Entry, dtype: torch.dtype, signals: Signals) -> Tensor:
    """The gradient of an entry in `dtype`, unscaled."""
    grad = entry.grad.to(dtype)
    return grad if signals.grad_scale is None else grad / signals.grad_scale.to(dtype)


def write_back(memory: StateSpec, entry: Entry, weight: Tensor, moments: Mapping[str, Tensor], step: int) -> None:
    """Round what update number `step` made of an entry into its weight, state and copy."""
    if memory.lazy:
        entry.state.update({key: entry.state.get(key, made) for key, made in memory.make(entry.param).items()})
    for stream, name in enumerate(memory.names, start=1):
        memory.write(entry.state, name, moments[name], formats.seed_of(step, stream))
    memory.write_weight(entry.param, entry.state, weight, formats.seed_of(step, 0))
    if entry.copy is not None:
        entry.copy.detach().copy_(weight)


def is_plain(entries: Sequence[Entry]) -> bool:
    """Return whether torch's own list functions can update these: one dtype for everything, nothing to round or
    copy."""
    first = entries[0]
    plain = (torch.float32, torch.float64)
    moments = (value for value in first.state.values() if isinstance(value, Tensor) and value.dim())
    same = all(value.dtype is first.param.dtype for value in (first.grad, *moments))
    return same and first.param.dtype in plain and first.copy is None
