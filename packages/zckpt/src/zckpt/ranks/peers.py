"""Peers of a save or load.

No communication library is required: any object with a rank, a world size and an `exchange` of JSON values will do.
`ALONE` is a world of one, and runs the same code; `group_peers` wraps a torch process group.
"""

from __future__ import annotations

from typing import Protocol, final

import attrs
import torch
import torch.distributed as dist

from zckpt.format import canonical
from zckpt.format.canonical import JSON


class Peers(Protocol):
    """The ranks that save or load one checkpoint together."""

    @property
    def rank(self) -> int:
        """This rank, 0 <= rank < world_size."""
        ...

    @property
    def world_size(self) -> int: ...

    def exchange(self, value: JSON) -> list[JSON]:
        """All-gather: the values of all ranks in rank order.  Every rank calls it; raises if a rank does not."""
        ...


@final
@attrs.frozen
class Alone:
    """A world of one; `exchange` still makes the JSON round trip, so that code that works here works on many
    ranks."""

    rank: int = 0
    world_size: int = 1

    def exchange(self, value: JSON) -> list[JSON]:
        return [canonical.load(canonical.dump(value))]


ALONE = Alone()


def group_peers(group: dist.ProcessGroup | None = None) -> Peers:
    """The ranks of an initialized process group (None: the default group).

    A background save communicates from its own thread: give it a group that is used for nothing else, such as
    `torch.distributed.new_group(backend="gloo")`, or its messages mix with those of the training.  A rank that dies
    raises an error on the others after the timeout of the group.
    """
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    return _GroupPeers(group, device, dist.get_rank(group), dist.get_world_size(group))


@final
@attrs.frozen(eq=False)
class _GroupPeers:
    """JSON over all_gather: the lengths first, then the texts, padded to the longest."""

    group: dist.ProcessGroup | None
    device: torch.device  # device that the backend communicates from
    rank: int
    world_size: int

    def exchange(self, value: JSON) -> list[JSON]:
        text = torch.frombuffer(bytearray(canonical.dump(value)), dtype=torch.uint8)
        mine = torch.tensor([len(text)], dtype=torch.int64, device=self.device)
        lengths = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(lengths, mine, group=self.group)
        sizes = [int(each) for each in lengths]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self.device)
        padded[: len(text)] = text
        texts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(texts, padded, group=self.group)
        return [canonical.load(bytes(each[:size].cpu().numpy())) for each, size in zip(texts, sizes)]
