"""Unused parameters: a step in which some parameters of a shard take no part, or have step counts of their own.

Problem.  In one process the gradient of an unused parameter is None, and the optimizer skips the parameter, its state
and its step count.  In a shard it lies between other parameters.

Design, for elementwise optimizers (`partial_update`).  While the optimizer steps, such a shard is replaced by its
*parts*: views of runs of pieces that are updated and have the same update history, each with views of its state and
its own counters.  Unused pieces are not shown to the optimizer, so nothing has to be restored, and a piece that was
never updated has no state, as the optimizer expects.  Afterwards the shard is one tensor again, with counters by
piece (counts.py).  Quantized state is decoded for the parts and encoded again.  This changes nothing, because
parameters begin where quantization blocks do; the layout guarantees it (`block_numel` in optimizer_state.py).

Design, for optimizers that look at shapes (`preserve_unused`).  They step all shards together, over all ranks, so
parameters without a gradient on any rank are updated, too, with zero gradients: momentum moves them, weight decay
shrinks them, and their steps count.  Their values are saved before the update and restored after it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import attrs
import torch
from torch import Tensor
from torch.nn import Parameter

from zpartition.layout.layout import Piece
from zpartition.state.counts import ALIKE, is_large, labels_of, number_of, numbers_after
from zpartition.state.optimizer_state import Holder, begin_state, elements, is_coded, set_state_of, state_of
from zpartition.state.shape_aware import segment_states

__all__ = ["have_own_counts", "partial_update", "preserve_unused"]

_KEPT_KEY = "step_size"  # Rprop's starts at lr, not at zero

UnusedPieces = Sequence[tuple[Holder, Piece]]


def have_own_counts(optimizer: torch.optim.Optimizer | None, holders: Sequence[Holder]) -> bool:
    """Return whether pieces of some holder have step counts of their own."""
    return optimizer is not None and any(ALIKE in optimizer.state.get(holder.tensor, ()) for holder in holders)


@contextmanager
def partial_update(
    optimizer: torch.optim.Optimizer, holders: Sequence[Holder], unused: frozenset[str] = frozenset()
) -> Iterator[None]:
    """Let the step inside update the pieces of these holders that are not `unused`, each by its own step count."""
    shards = [shard for holder in holders if (shard := _PartialShard.of(optimizer, holder, unused)) is not None]
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


@contextmanager
def preserve_unused(optimizer: torch.optim.Optimizer | None, unused: UnusedPieces) -> Iterator[None]:
    """Restore the weights and optimizer state of these pieces after the update inside.

    State that the update has created becomes zero.  Quantized state is restored as exactly as its format allows: an
    element may share a scale with an updated one.
    """
    weights = [(part, part.clone()) for holder, piece in unused for part in [_part(holder.tensor.data, piece)]]
    shards = {id(holder): _UnusedShard(holder, dict(_state(optimizer, holder))) for holder, _ in unused}
    for holder, piece in unused:
        shards[id(holder)].keep(optimizer, piece)
    yield
    for part, value in weights:
        part.copy_(value)
    if optimizer is not None:
        for shard in shards.values():
            shard.restore(optimizer)


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
class _PartialShard:
    """A holder that is replaced by its parts during a step."""

    optimizer: torch.optim.Optimizer
    holder: Holder
    is_updated: list[bool]  # by piece
    parts: list[_Part]
    before: dict[str, Any]  # its state, as `state_of` gives it

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, holder: Holder, unused: frozenset[str]) -> _PartialShard | None:
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
                f"{tuple(value.shape)}, neither a number nor a value for each element, and the parameters that share "
                "its shard are not used in the same steps. Use all of them in every step, or another optimizer."
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
            return  # no piece has any state
        if any(map(is_coded, (*self.before.values(), *(v for found in states for v in found.values())))):
            set_state_of(self.optimizer, tensor, state)
        else:
            self.optimizer.state[tensor].update(state)

    def _whole(self, value: Any) -> Any:
        """Return a writable state."""
        tensor = self.holder.tensor
        return elements(value, 0, tensor.numel()).view(tensor.shape) if is_coded(value) else value


@attrs.define(eq=False)
class _UnusedShard:
    """A holder with unused pieces, and their values before the update."""

    holder: Holder
    before: dict[str, Any]  # the optimizer's state; counters are copies
    kept: dict[Piece, dict[str, Tensor]] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        numbers = {key: value for key, value in self.before.items() if isinstance(value, Tensor)}
        self.before.update({key: v.clone() for key, v in numbers.items() if not is_large(key, v)})

    def keep(self, optimizer: torch.optim.Optimizer | None, piece: Piece) -> None:
        """Save a piece before the update."""
        parts = _parts(optimizer, self.before, self.holder, piece)
        self.kept[piece] = {key: part.clone() for key, part in parts.items()}

    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Restore the pieces after the update; quantized state is decoded and encoded again."""
        if not self.before and len(self.kept) == len(self.holder.pieces):
            optimizer.state.pop(self.holder.tensor, None)
            return
        state = dict(_state(optimizer, self.holder))
        coded = [key for key, value in state.items() if is_coded(value)]
        shape = self.holder.tensor.shape
        state.update({key: elements(state[key], 0, shape.numel()).view(shape) for key in coded})
        for piece, kept in self.kept.items():
            for key, part in _parts(optimizer, state, self.holder, piece).items():
                if key in kept:
                    part.copy_(kept[key])
                elif key != _KEPT_KEY:
                    part.zero_()
        numbers = self._numbers(optimizer, state)
        if coded:
            set_state_of(optimizer, self.holder.tensor, {**state, **numbers})
        elif numbers:
            optimizer.state[self.holder.tensor].update(numbers)

    def _numbers(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the counters of each piece, if they are not kept by segment."""
        pieces = self.holder.pieces
        if not state or segment_states(optimizer, self.holder.tensor, state) is not None:
            return {}
        if len(self.kept) == len(pieces):
            return {key: value for key, value in self.before.items() if not is_large(key, value)}
        keys = [key for key, value in state.items() if key != ALIKE and not is_large(key, value)]
        now = [{key: number_of(state, key, index, len(pieces)) for key in keys} for index in range(len(pieces))]
        return numbers_after(self.before, now, [piece not in self.kept for piece in pieces])


def _state(optimizer: torch.optim.Optimizer | None, holder: Holder) -> Mapping[str, Any]:
    return {} if optimizer is None else state_of(optimizer, holder.tensor)


def _parts(
    optimizer: torch.optim.Optimizer | None, state: Mapping[str, Any], holder: Holder, piece: Piece
) -> dict[str, Tensor]:
    """Return the elements of `piece` in every state that is shaped like `holder`, or all of its state by segment."""
    by_segment = None if optimizer is None else segment_states(optimizer, holder.tensor, state)
    if by_segment is not None:
        return by_segment[holder.pieces.index(piece)]
    numel = holder.tensor.numel()
    elementwise = {k: value for k, value in state.items() if is_large(k, value) and value.shape.numel() == numel}
    return {key: elements(value, piece.offset, piece.offset + piece.numel) for key, value in elementwise.items()}


def _part(tensor: Tensor, piece: Piece) -> Tensor:
    return tensor.view(-1)[piece.offset : piece.offset + piece.numel]


def _write(place: Tensor, values: Tensor) -> None:
    """Copy `values`, unless they are there."""
    if place.data_ptr() != values.data_ptr():
        place.copy_(values)


def _nothing() -> None:
    """Do nothing, for an optimizer without plans."""
