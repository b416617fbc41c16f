"""Weights of a deferred module that somebody looks at, or writes, before `shard` takes them.

    with zpartition.Init():
        model = GPT(...)
    with zpartition.gathered(model.embed, modifier_rank=0):       # no partition owns them yet
        if rank == 0:
            model.embed.weight.copy_(pretrained)

Problem.  A tape says how values come about, and an edit is none of its operations: it may happen on one rank only.

Design.  The first look plays the whole tape, once, and every rank keeps its slice of each finished storage: the
memory of a rank is the model's divided by the ranks, as after `shard`.  From then on the tape begins with those
contents, and whoever plays it (a cast, `shard`) gathers one storage at a time.  Inside a block the parameters are
real tensors; afterwards they are on the meta device again, the same objects, and what rank `modifier_rank` made of
them is everybody's.

Rejected: recording edits on the tape (ranks would have different tapes), and giving every rank whole weights (the
model does not fit).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import final

import attrs
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

import zcomm
from zpartition import _compat
from zpartition.deferred import draw_alike, tape_that_knows, wire_device
from zpartition.hidden import hide, show
from zpartition.tape import Key, Ref, Tape, key_of

__all__ = ["Settled", "early_weights", "settle"]


@final
@attrs.define(eq=False)
class Settled:
    """Finished storages, a slice on each rank.  Invariant: the same keys, in the same order, on all ranks."""

    group: ProcessGroup | None
    nbytes: dict[Key, int] = attrs.field(factory=dict)
    parts: dict[Key, Tensor] = attrs.field(factory=dict)  # (ceil(nbytes / ranks),) uint8, the last one padded

    def put(self, key: Key, content: Tensor) -> None:
        """Keep this rank's slice of `content`, (nbytes,) uint8; no other rank is asked."""
        size, rank = zcomm.group_size(self.group), zcomm.group_rank(self.group)
        length = -(-content.numel() // size)
        mine = content[rank * length : (rank + 1) * length]
        self.nbytes[key] = content.numel()
        self.parts[key] = torch.nn.functional.pad(mine, (0, length - mine.numel())).clone()

    def whole(self, key: Key) -> Tensor | None:
        """All of a storage on the CPU, (nbytes,) uint8; None for one that was not put.  A collective."""
        if key not in self.parts:
            return None
        mine = self.parts[key].to(wire_device(self.group))
        gathered = mine.new_empty(mine.numel() * zcomm.group_size(self.group))
        zcomm.all_gather(gathered, mine, self.group, label="early weights")
        return gathered[: self.nbytes[key]].cpu()

    def differs(self, key: Key, content: Tensor) -> bool:
        """Whether this rank's slice of `content` is another than the one it keeps."""
        kept, rank = self.parts[key], zcomm.group_rank(self.group)
        mine = content[rank * kept.numel() : (rank + 1) * kept.numel()].cpu()
        return not torch.equal(mine, kept[: mine.numel()])


def settle(tape: Tape, group: ProcessGroup | None) -> Settled:
    """Play the tape, keep what it makes, and let it begin from there; once.  A collective."""
    known = getattr(tape.before, "__self__", None)
    if isinstance(known, Settled):
        return known
    draw_alike(tape, group)
    made = Settled(group)
    tape.play(made.put, wanted=frozenset(tape.storages))
    tape.steps.clear()
    tape.constants.clear()
    tape.before = made.whole
    return made


@contextmanager
def early_weights(tensors: Iterable[Tensor], modifier_rank: int | None) -> Iterator[None]:
    """Those of `tensors` that a tape knows, real inside the block; others are left alone.  A collective.

    Raises ValueError on every rank, leaving the weights as they were, for edits that differ without a modifier_rank.
    """
    tensors = list(tensors)
    hidden = show(tensors)
    by_tape: dict[int, tuple[Tape, list[Tensor]]] = {}
    for tensor in tensors:
        if (tape := tape_that_knows(tensor)) is not None:
            by_tape.setdefault(id(tape), (tape, []))[1].append(tensor)
    devices = {id(param): device for param, device in hidden}
    blocks = [_Block.of(tape, members, devices) for tape, members in by_tape.values()]
    try:
        yield
    finally:
        for block in blocks:
            block.make_meta()
        for param, device in hidden:
            hide([param], device)
    for block in blocks:
        block.take_agreed() if modifier_rank is None else block.spread(modifier_rank)


@final
@attrs.define(eq=False)
class _Block:
    """The tensors of one tape that are real now."""

    settled: Settled
    contents: dict[Key, Tensor]  # storages, in the tape's order
    swapped: list[tuple[Tensor, Tensor, Ref]]  # (the module's tensor, real now; what was in it; where it lies)

    @classmethod
    def of(cls, tape: Tape, members: list[Tensor], devices: Mapping[int, torch.device]) -> _Block:
        """devices: where members say that they are, by identity; the CPU for the others."""
        settled = settle(tape, None)
        wanted = {key_of(tensor): devices.get(id(tensor), torch.device("cpu")) for tensor in members}
        contents: dict[Key, Tensor] = {}
        for key in tape.storages:  # callers may come with a set, whose order is another on each rank
            if key in wanted and (content := settled.whole(key)) is not None:
                contents[key] = content.to(wanted[key])
        swapped = []
        for tensor in {id(tensor): tensor for tensor in members}.values():
            ref = Ref.of(tensor)
            real = ref.seen_in(contents[ref.key])
            if isinstance(tensor, Parameter):
                real = Parameter(real, requires_grad=tensor.requires_grad)
            _compat.swap(tensor, real)
            swapped.append((tensor, real, ref))
        return cls(settled, contents, swapped)

    def make_meta(self) -> None:
        """Take the values out of the tensors; what was assigned to `.data` counts as an edit."""
        for tensor, was, ref in self.swapped:
            place = ref.seen_in(self.contents[ref.key])
            if tensor.data_ptr() != place.data_ptr():
                with torch.no_grad():
                    place.copy_(tensor)
            is_trained = tensor.requires_grad
            _compat.swap(tensor, was)
            tensor.requires_grad_(is_trained)

    def spread(self, source: int) -> None:
        for key, content in self.contents.items():
            moved = content.to(wire_device(self.settled.group))
            zcomm.broadcast(moved, self.settled.group, source=source, label="early weights")
            self.settled.put(key, moved.cpu())

    def take_agreed(self) -> None:
        """Keep what all ranks have written alike.  ValueError for anything else."""
        if not self._any_rank(any(self.settled.differs(key, content) for key, content in self.contents.items())):
            return
        differ = False
        for content in self.contents.values():
            first = content.to(wire_device(self.settled.group), copy=True)
            zcomm.broadcast(first, self.settled.group, source=0, label="early edits")
            differ = differ or not torch.equal(first, content.to(first.device))
        if self._any_rank(differ):
            raise ValueError(
                "parameters were edited inside gathered(...) before they were partitioned, differently on the ranks, "
                "and without modifier_rank nobody knows whose edits count; they are undone. Pass modifier_rank=0 and "
                "edit on that rank."
            )
        for key, content in self.contents.items():
            self.settled.put(key, content.cpu())

    def _any_rank(self, here: bool) -> bool:
        found = torch.tensor(float(here), device=wire_device(self.settled.group))
        zcomm.all_reduce(found, self.settled.group, op="max", label="early edits")
        return bool(found.item())
