"""The fallback without kernels: the pure rule, tensor by tensor, for any device, layout and format.

The rules are also the oracle of the kernels.  Low-precision weights and moments are read as float32, updated, and
rounded with the kernels' noise.
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
    "fits_foreach",
    "next_step",
    "unscale_gradient",
    "update_in_torch",
    "write_back",
]


class HasRule(Protocol):
    """The methods of an optimizer that the fallback calls."""

    def _state_spec(self, group: Mapping[str, Any]) -> StateSpec: ...

    def _evaluate(
        self, group: Mapping[str, Any], param: Tensor, grad: Tensor, moments: dict[str, Tensor], step: int
    ) -> tuple[Tensor, dict[str, Tensor]]: ...


def update_in_torch(optimizer: HasRule, group: Mapping[str, Any], entries: Sequence[Entry], signals: Signals) -> None:
    """Update `entries` in place.  Not called for skipped steps."""
    spec = optimizer._state_spec(group)
    for entry in entries:
        step = next_step(entry)
        weight = spec.read_weight(entry.param, entry.state)
        grad = unscale_gradient(entry, weight.dtype, signals)
        moments = {name: spec.read(entry.state, name) for name in spec.names if name in entry.state}
        new, after = optimizer._evaluate(group, weight, grad, moments, step)
        write_back(spec, entry, new, after, step)
    count_update(entries)


def next_step(entry: Entry) -> int:
    """Return the number of the next update, the highest of a shard's parts; 1 if there is no count."""
    count = entry.state.get(STEP)
    return 1 if count is None else int(count.max()) + 1


def count_update(entries: Sequence[Entry]) -> None:
    """Advance the counts of entries by one; a count that parts of a shard share advances once."""
    for count in {id(entry.state[STEP]): entry.state[STEP] for entry in entries if STEP in entry.state}.values():
        count += 1


def unscale_gradient(entry: Entry, dtype: torch.dtype, signals: Signals) -> Tensor:
    """Return the gradient of an entry in `dtype`, divided by grad_scale."""
    grad = entry.grad.to(dtype)
    return grad if signals.grad_scale is None else grad / signals.grad_scale.to(dtype)


def write_back(spec: StateSpec, entry: Entry, weight: Tensor, moments: Mapping[str, Tensor], step: int) -> None:
    """Round the result of update number `step` into the entry's weight, state and copy."""
    if spec.lazy:
        entry.state.update({key: entry.state.get(key, made) for key, made in spec.make(entry.param).items()})
    for stream, name in enumerate(spec.names, start=1):
        spec.write(entry.state, name, moments[name], formats.seed_of(step, stream))
    spec.write_weight(entry.param, entry.state, weight, formats.seed_of(step, 0))
    if entry.copy is not None:
        entry.copy.detach().copy_(weight)


def fits_foreach(entries: Sequence[Entry]) -> bool:
    """Return whether torch's foreach functions can update entries: one dtype, nothing to round or copy."""
    first = entries[0]
    plain = (torch.float32, torch.float64)
    moments = (value for value in first.state.values() if isinstance(value, Tensor) and value.dim())
    same = all(value.dtype is first.param.dtype for value in (first.grad, *moments))
    return same and first.param.dtype in plain and first.copy is None
