"""Unused parameters in a step that updates their whole shard.

An elementwise optimizer sees only the pieces that it updates (apart.py).  An optimizer that looks at shapes steps all
shards at once, over all ranks, so parameters without a gradient on any rank are updated, too, with zero gradients:
momentum would move them, weight decay shrink them, and their steps would count.  Their values are saved and restored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch

from zpartition.layout.layout import Piece
from zpartition.state.counts import ALIKE, is_large, number_of, numbers_after
from zpartition.state.optimizer_state import Holder, elements, is_coded, set_state_of, state_of
from zpartition.state.shape_aware import segment_states

_KEPT_KEY = "step_size"  # Rprop's starts at lr, not at zero

UnusedPieces = Sequence[tuple[Holder, Piece]]


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


@attrs.define(eq=False)
class _UnusedShard:
    """A holder with unused pieces, and their values before the update."""

    holder: Holder
    before: dict[str, Any]  # the optimizer's state; counters are copies
    kept: dict[Piece, dict[str, torch.Tensor]] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        numbers = {key: value for key, value in self.before.items() if isinstance(value, torch.Tensor)}
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
