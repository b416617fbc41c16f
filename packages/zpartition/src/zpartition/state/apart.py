"""Partial updates: a step in which some parameters of a shard take no part, or have step counts of their own.

In one process the gradient of an unused parameter is None: the optimizer skips it, its state and its step count.
On a shard it lies between other parameters.  So while the optimizer steps, such a shard is replaced by its
*parts*: views of runs of pieces that are updated and have the same update history, each with views of its state
and counters of its own.  Unused pieces are not shown to the optimizer, so nothing has to be restored, and a piece
that was never updated has no state, as the optimizer expects.  Afterwards the shard is one tensor again, with
counters by piece (counts.py).

Quantized state is decoded for the parts and encoded again.  This changes nothing, because parameters begin where
quantization blocks do; the layout guarantees it (`block_numel` in optimizer_state.py).

Optimizers that look at shapes step all shards together, over all ranks; see `preserve_unused` in unused.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import attrs
import torch
from torch import Tensor
from torch.nn import Parameter

from zpartition.state.counts import ALIKE, is_large, labels_of, number_of, numbers_after
from zpartition.state.optimizer_state import Holder, begin_state, elements, is_coded, set_state_of, state_of

__all__ = ["in_parts"]


@contextmanager
def in_parts(
    optimizer: torch.optim.Optimizer, holders: Sequence[Holder], unused: frozenset[str] = frozenset()
) -> Iterator[None]:
    """Let a step inside update the pieces of these holders that are not `unused`, each by its own step count."""
    shards = [shard for holder in holders if (shard := _Shard.of(optimizer, holder, unused)) is not None]
    if not shards:
        yield
        return
    lists = [group["params"] for group in optimizer.param_groups]
    parts = {id(shard.holder.tensor): [part.tensor for part in shard.parts] for shard in shards}
    for group, members in zip(optimizer.param_groups, lists):
        group["params"] = [part for member in members for part in parts.get(id(member), [member])]
    found: list[list[dict[str, Any]]] = []
    try:
        for shard in shards:
            shard.set_state()
        yield
        found = [[dict(state_of(optimizer, part.tensor)) for part in shard.parts] for shard in shards]
    finally:
        for group, members in zip(optimizer.param_groups, lists):
            group["params"] = members
        for part in itertools.chain.from_iterable(parts.values()):
            optimizer.state.pop(part, None)
        getattr(optimizer, "clear_plans", _nothing)()  # plans would keep the memory of views alive
    for shard, states in zip(shards, found):
        shard.adopt(states)


def _nothing() -> None:
    """Do nothing, for an optimizer without plans."""


@attrs.frozen(eq=False)
class _Part:
    """A run of pieces with one update history."""

    pieces: range  # indices
    tensor: Parameter  # (elements,) a view of the shard's, with its gradient
    start: int  # in the shard

    @property
    def row(self) -> slice:
        return slice(self.start, self.start + self.tensor.numel())


@final
@attrs.frozen(eq=False)
class _Shard:
    """A holder that is replaced by its parts."""

    optimizer: torch.optim.Optimizer
    holder: Holder
    is_updated: list[bool]  # by piece
    parts: list[_Part]
    before: dict[str, Any]  # its state, as `state_of` gives it

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, holder: Holder, unused: frozenset[str]) -> _Shard | None:
        """Return the parts of a shard; None if it can be updated as it is."""
        tensor, pieces = holder.tensor, holder.pieces
        have_differed = ALIKE in optimizer.state.get(tensor, ())
        if tensor.grad is None or not (unused or have_differed):
            return None
        is_updated = [piece.slot.name not in unused for piece in pieces]
        if all(is_updated) and not have_differed:
            return None
        state = dict(state_of(optimizer, tensor))
        labels = labels_of(state, len(pieces))
        parts = []
        for (_, here), run in itertools.groupby(range(len(pieces)), lambda i: (labels[i], is_updated[i])):
            if here:
                indices = list(run)
                first, last = pieces[indices[0]], pieces[indices[-1]]
                row = slice(first.offset, last.offset + last.numel)
                part = Parameter(tensor.detach()[row], requires_grad=tensor.requires_grad)
                part.grad = tensor.grad[row]
                parts.append(_Part(range(indices[0], indices[-1] + 1), part, row.start))
        return cls(optimizer, holder, is_updated, parts, state)

    def set_state(self) -> None:
        """Give the optimizer the state of each part."""
        labels = labels_of(self.before, len(self.is_updated))
        for part in self.parts:
            if not labels[part.pieces[0]]:
                begin_state(self.optimizer, part.tensor)
                continue
            state = {key: self._cut(key, part) for key in self.before if key != ALIKE}
            if any(map(is_coded, self.before.values())):
                set_state_of(self.optimizer, part.tensor, state)
            else:
                self.optimizer.state[part.tensor] = state

    def _cut(self, key: str, part: _Part) -> Any:
        """Return state `key` of a part: a view of its elements, or a number."""
        value, holder = self.before[key], self.holder
        if is_coded(value):
            return elements(value, part.row.start, part.row.stop)
        if is_large(key, value) and value.numel() == holder.tensor.numel():
            return value.view(-1)[part.row]
        number = number_of(self.before, key, part.pieces[0], len(holder.pieces))
        if isinstance(number, Tensor) and number.numel() != 1:
            raise ValueError(
                f"state {key!r} of {type(self.optimizer).__name__} for {holder.pieces[0].slot.name} has shape "
                f"{tuple(value.shape)}, neither a number nor a value for each element, and parameters that share its "
                "shard are not used in the same steps. Use all of them in every step, or another optimizer."
            )
        return number.clone() if isinstance(number, Tensor) else number

    def adopt(self, states: Sequence[dict[str, Any]]) -> None:
        """Give the optimizer one state of the shard, merged from its parts."""
        tensor = self.holder.tensor
        whole = {key: self._whole(value) for key, value in self.before.items()}
        now: list[dict[str, Any]] = [{} for _ in self.is_updated]
        for part, state in zip(self.parts, states):
            for key, value in state.items():
                if is_large(key, value) and value.shape.numel() == part.tensor.numel():
                    kept = whole.get(key)
                    if kept is None:
                        kept = whole[key] = torch.zeros_like(tensor.data, dtype=value.dtype)
                    _write(kept.view(-1)[part.row], elements(value, 0, part.tensor.numel()))
                else:
                    for index in part.pieces:
                        now[index][key] = value
        state = {**whole, **numbers_after(self.before, now, self.is_updated)}
        if set(state) == {ALIKE}:
            return  # nothing is kept of anything
        if any(map(is_coded, (*self.before.values(), *(v for found in states for v in found.values())))):
            set_state_of(self.optimizer, tensor, state)
        else:
            self.optimizer.state[tensor].update(state)

    def _whole(self, value: Any) -> Any:
        """Return a writable state."""
        tensor = self.holder.tensor
        return elements(value, 0, tensor.numel()).view(tensor.shape) if is_coded(value) else value


def _write(place: Tensor, values: Tensor) -> None:
    """Copy `values`, unless they are there."""
    if place.data_ptr() != values.data_ptr():
        place.copy_(values)
