"""Parameters that rest: which they are, and a shard that is updated whole although it holds some.

An elementwise optimizer is given what it shall update (apart.py).  One that looks at shapes steps all shards at once,
over all ranks, so parameters that no rank used are updated too, with zero gradients: momentum would move them, decay
would shrink them, and they would be counted.  What they were is kept and put back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs
import torch

import zcomm
from zpartition.counts import ALIKE, is_large, number_of, numbers_after
from zpartition.layout import Piece
from zpartition.shapes import segment_states
from zpartition.state import Holder, elements, give_state, is_coded, state_of

if TYPE_CHECKING:
    from zpartition.partition import Partition

_STAYS = "step_size"  # Rprop's starts at lr, not at zero

Resting = Sequence[tuple[Holder, Piece]]


@attrs.frozen
class Unused:
    """Names of parameters; the same on all ranks."""

    by_all: frozenset[str] = frozenset()  # no rank used them
    by_some: frozenset[str] = frozenset()  # some rank, or none, did not use them


def agree_on_unused(partition: Partition) -> Unused:
    """Which parameters the ranks have no gradient of.

    Raises:
        ValueError: there are some and the policy forbids it, or there is no gradient at all.
    """
    slots = [slot.name for _, slot in partition.layout.slots()]
    flags = [i in gradient.seen for gradient in partition.reducer.gradients for i in range(len(gradient.params))]
    used = torch.tensor(flags, dtype=torch.int32, device=partition.reducer.pool.device)
    zcomm.all_reduce(used, partition.group, label="used parameters")
    counts = dict(zip(slots, used.tolist()))
    names = frozenset(name for name, count in counts.items() if not count)
    if slots and len(names) == len(slots):
        raise ValueError(
            "no rank produced a gradient for any parameter: the loss comes from another module, or is constant"
        )
    if names and not partition.policy.ignore_unused:
        raise ValueError(
            f"no rank produced a gradient for {', '.join(sorted(names)[:10])} ({len(names)} in all). Use them in "
            "the forward pass, freeze them, or set ignore_unused_parameters to true."
        )
    return Unused(names, frozenset(name for name, count in counts.items() if count < partition.layout.world_size))


@contextmanager
def untouched(optimizer: torch.optim.Optimizer | None, resting: Resting) -> Iterator[None]:
    """Put the weights and the optimizer state of these pieces back after the update inside.

    State that the update has just made becomes zero.  State in a coarse format comes back as exactly as that can say
    it: an element may share a scale with one that was updated.
    """
    weights = [(part, part.clone()) for holder, piece in resting for part in [_part(holder.tensor.data, piece)]]
    shards = {id(holder): _Shard(holder, dict(_state(optimizer, holder))) for holder, _ in resting}
    for holder, piece in resting:
        shards[id(holder)].keep(optimizer, piece)
    yield
    for part, value in weights:
        part.copy_(value)
    if optimizer is not None:
        for shard in shards.values():
            shard.put_back(optimizer)


@attrs.define(eq=False)
class _Shard:
    """A holder some of whose pieces rest, and what was kept of them before the update."""

    holder: Holder
    before: dict[str, Any]  # the optimizer's state; numbers are copies
    kept: dict[Piece, dict[str, torch.Tensor]] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        numbers = {key: value for key, value in self.before.items() if isinstance(value, torch.Tensor)}
        self.before.update({key: v.clone() for key, v in numbers.items() if not is_large(key, v)})

    def keep(self, optimizer: torch.optim.Optimizer | None, piece: Piece) -> None:
        """Before the update."""
        parts = _parts(optimizer, self.before, self.holder, piece)
        self.kept[piece] = {key: part.clone() for key, part in parts.items()}

    def put_back(self, optimizer: torch.optim.Optimizer) -> None:
        """After it; what is coded is decoded and encoded again."""
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
                elif key != _STAYS:
                    part.zero_()
        numbers = self._numbers(optimizer, state)
        if coded:
            give_state(optimizer, self.holder.tensor, {**state, **numbers})
        elif numbers:
            optimizer.state[self.holder.tensor].update(numbers)

    def _numbers(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
        """Those of each piece, where they are not kept by segment."""
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
) -> dict[str, torch.Tensor]:
    """The elements of `piece` in every state that is laid out like `holder`, or all of its state by segment."""
    by_segment = None if optimizer is None else segment_states(optimizer, holder.tensor, state)
    if by_segment is not None:
        return by_segment[holder.pieces.index(piece)]
    numel = holder.tensor.numel()
    laid_out = {k: value for k, value in state.items() if is_large(k, value) and value.shape.numel() == numel}
    return {key: elements(value, piece.offset, piece.offset + piece.numel) for key, value in laid_out.items()}


def _part(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    return tensor.view(-1)[piece.offset : piece.offset + piece.numel]
