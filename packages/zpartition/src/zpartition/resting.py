"""Parameters that rest while the shard around them is updated.

A flat shard is updated whole, so parameters that no rank used are updated too, with zero gradients: momentum would
move them and decay would shrink them.  What they were is kept and put back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs
import torch

import zcomm
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
    states = [_parts(optimizer, _state(optimizer, holder), holder, piece) for holder, piece in resting]
    before = [{key: part.clone() for key, part in parts.items()} for parts in states]
    yield
    for part, value in weights:
        part.copy_(value)
    for holder in {id(holder): holder for holder, _ in resting}.values():
        mine = [(piece, kept) for (other, piece), kept in zip(resting, before) if other is holder]
        if optimizer is not None:
            _put_back(optimizer, holder, mine)


def _put_back(
    optimizer: torch.optim.Optimizer, holder: Holder, mine: Sequence[tuple[Piece, dict[str, torch.Tensor]]]
) -> None:
    """Write what was kept of each piece into the state of `holder`; what is coded is decoded and encoded again."""
    state = dict(_state(optimizer, holder))
    coded = [key for key, value in state.items() if is_coded(value)]
    state.update({key: elements(state[key], 0, holder.tensor.numel()).view(holder.tensor.shape) for key in coded})
    for piece, kept in mine:
        for key, part in _parts(optimizer, state, holder, piece).items():
            if key in kept:
                part.copy_(kept[key])
            elif key != _STAYS:
                part.zero_()
    if coded:
        give_state(optimizer, holder.tensor, state)


def _state(optimizer: torch.optim.Optimizer | None, holder: Holder) -> Any:
    return {} if optimizer is None else state_of(optimizer, holder.tensor)


def _parts(
    optimizer: torch.optim.Optimizer | None, state: Any, holder: Holder, piece: Piece
) -> dict[str, torch.Tensor]:
    """The elements of `piece` in every state that is laid out like `holder`, or all of its state by segment."""
    by_segment = None if optimizer is None else segment_states(optimizer, holder.tensor, state)
    if by_segment is not None:
        part = by_segment[holder.pieces.index(piece)]
        return {key: value for key, value in part.items() if value.dim()}
    numel = holder.tensor.numel()
    laid_out = {
        key: value
        for key, value in state.items()
        if is_coded(value) or (isinstance(value, torch.Tensor) and value.dim() and value.numel() == numel)
    }
    return {key: elements(value, piece.offset, piece.offset + piece.numel) for key, value in laid_out.items()}


def _part(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    return tensor.view(-1)[piece.offset : piece.offset + piece.numel]
