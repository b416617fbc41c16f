"""Early weights: read or edit weights of a deferred module before `shard` materializes them.

    with zpartition.Init():
        model = GPT(...)
    with zpartition.gathered(model.embed, modifier_rank=0):       # not partitioned yet
        if rank == 0:
            model.embed.weight.copy_(pretrained)

Problem.  A recording holds operations, and an edit is not recorded: it may happen on one rank only.

Design.  The first access replays the whole recording once, and every rank keeps its slice of each finished storage:
memory per rank is the model divided by the ranks, as after `shard`.  From then on the recording begins with these
contents, and a replay (for a cast, or `shard`) gathers one storage at a time.  Inside a block the parameters are real
tensors; afterwards they are on the meta device again, the same objects, and the edits of rank `modifier_rank` are
broadcast.

Rejected: recording edits (ranks would have different recordings), and giving every rank full weights (the model does
not fit).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import final

import attrs
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

import zcomm
from zpartition import _compat
from zpartition.deferred.fake_device import clear_fake_device, set_fake_device
from zpartition.deferred.init import recording_for, share_seeds, suspend_init, wire_device
from zpartition.deferred.recording import InitRecording, Key, Ref, key_of

__all__ = ["MaterializedStorages", "early_weights", "materialize"]


@final
@attrs.define(eq=False)
class MaterializedStorages:
    """Finished storages, a slice on each rank.  Invariant: the same keys, in the same order, on all ranks."""

    group: ProcessGroup | None
    nbytes: dict[Key, int] = attrs.field(factory=dict)
    parts: dict[Key, Tensor] = attrs.field(factory=dict)  # (ceil(nbytes / ranks),) uint8, the last one padded

    def put(self, key: Key, content: Tensor) -> None:
        """Keep this rank's slice of `content`, (nbytes,) uint8; not a collective."""
        size, rank = zcomm.group_size(self.group), zcomm.group_rank(self.group)
        length = -(-content.numel() // size)
        mine = content[rank * length : (rank + 1) * length]
        self.nbytes[key] = content.numel()
        self.parts[key] = torch.nn.functional.pad(mine, (0, length - mine.numel())).clone()

    def whole(self, key: Key) -> Tensor | None:
        """Gather a storage on the CPU, (nbytes,) uint8; None if it was not put.  A collective."""
        if key not in self.parts:
            return None
        mine = self.parts[key].to(wire_device(self.group))
        gathered = mine.new_empty(mine.numel() * zcomm.group_size(self.group))
        zcomm.all_gather(gathered, mine, self.group, label="early weights")
        return gathered[: self.nbytes[key]].cpu()

    def differs(self, key: Key, content: Tensor) -> bool:
        """Return whether this rank's slice of `content` differs from the one that it keeps."""
        kept, rank = self.parts[key], zcomm.group_rank(self.group)
        mine = content[rank * kept.numel() : (rank + 1) * kept.numel()].cpu()
        return not torch.equal(mine, kept[: mine.numel()])


def materialize(recorded: InitRecording, group: ProcessGroup | None) -> MaterializedStorages:
    """Replay a recording once, keep the storages, and let the recording begin from them.  A collective."""
    known = getattr(recorded.before, "__self__", None)
    if isinstance(known, MaterializedStorages) and not recorded.steps:
        return known
    share_seeds(recorded, group)
    made = MaterializedStorages(group)
    recorded.replay(made.put, wanted=frozenset(recorded.storages))
    recorded.steps.clear()
    recorded.constants.clear()
    recorded.before = made.whole
    return made


@contextmanager
def early_weights(tensors: Iterable[Tensor], modifier_rank: int | None) -> Iterator[None]:
    """Make deferred `tensors` real inside the block; others are left alone.  A collective.

    Raises ValueError on every rank, with weights unchanged, for edits that differ without a modifier_rank.
    """
    tensors = list(tensors)
    faked = clear_fake_device(tensors)
    by_recording: dict[int, tuple[InitRecording, list[Tensor]]] = {}
    for tensor in tensors:
        if (recorded := recording_for(tensor)) is not None:
            by_recording.setdefault(id(recorded), (recorded, []))[1].append(tensor)
    devices = {id(param): device for param, device in faked}
    with suspend_init() if by_recording else nullcontext():
        blocks = [_EarlyBlock.of(recorded, members, devices) for recorded, members in by_recording.values()]
        try:
            yield
        finally:
            for block in blocks:
                block.make_meta()
            for param, device in faked:
                set_fake_device([param], device)
        for block in blocks:
            block.adopt_agreed() if modifier_rank is None else block.broadcast_edits(modifier_rank)


@final
@attrs.define(eq=False)
class _EarlyBlock:
    """Tensors of one recording that are real inside a block."""

    storages: MaterializedStorages
    contents: dict[Key, Tensor]  # storages, in the order of the recording
    swapped: list[tuple[Tensor, Tensor, Ref]]  # (the module's tensor, now real; its former content; its position)

    @classmethod
    def of(cls, recorded: InitRecording, members: list[Tensor], devices: Mapping[int, torch.device]) -> _EarlyBlock:
        """Make `members` real.  devices: their fake devices, by identity; CPU for the others."""
        storages = materialize(recorded, None)
        wanted = {key_of(tensor): devices.get(id(tensor), torch.device("cpu")) for tensor in members}
        contents: dict[Key, Tensor] = {}
        for key in recorded.storages:  # callers may pass a set, whose order differs between ranks
            if key in wanted and (content := storages.whole(key)) is not None:
                contents[key] = content.to(wanted[key])
        swapped = []
        for tensor in {id(tensor): tensor for tensor in members}.values():
            ref = Ref.of(tensor)
            real = ref.seen_in(contents[ref.key])
            if isinstance(tensor, Parameter):
                real = Parameter(real, requires_grad=tensor.requires_grad)
            _compat.swap(tensor, real)
            swapped.append((tensor, real, ref))
        return cls(storages, contents, swapped)

    def make_meta(self) -> None:
        """Move the tensors back to the meta device; an assignment to `.data` counts as an edit."""
        for tensor, was, ref in self.swapped:
            place = ref.seen_in(self.contents[ref.key])
            if tensor.data_ptr() != place.data_ptr():
                with torch.no_grad():
                    place.copy_(tensor)
            is_trained = tensor.requires_grad
            _compat.swap(tensor, was)
            tensor.requires_grad_(is_trained)

    def broadcast_edits(self, source: int) -> None:
        for key, content in self.contents.items():
            moved = content.to(wire_device(self.storages.group))
            zcomm.broadcast(moved, self.storages.group, source=source, label="early weights")
            self.storages.put(key, moved.cpu())

    def adopt_agreed(self) -> None:
        """Keep edits that all ranks made alike.  Raises ValueError for others."""
        if not self._any_rank(any(self.storages.differs(key, content) for key, content in self.contents.items())):
            return
        differ = False
        for content in self.contents.values():
            first = content.to(wire_device(self.storages.group), copy=True)
            zcomm.broadcast(first, self.storages.group, source=0, label="early edits")
            differ = differ or not torch.equal(first, content.to(first.device))
        if self._any_rank(differ):
            raise ValueError(
                "parameters edited inside gathered(...), before they were partitioned, differ between ranks; "
                "without modifier_rank edits must be equal on all ranks, so they are undone. Pass modifier_rank=0 "
                "and edit on that rank."
            )
        for key, content in self.contents.items():
            self.storages.put(key, content.cpu())

    def _any_rank(self, here: bool) -> bool:
        found = torch.tensor(float(here), device=wire_device(self.storages.group))
        zcomm.all_reduce(found, self.storages.group, op="max", label="early edits")
        return bool(found.item())
