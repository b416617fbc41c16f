"""A torch process group as Peers."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import attrs
import torch
import torch.distributed as dist

from . import canonical
from .canonical import JSON

if TYPE_CHECKING:
    from .peers import Peers


def group_peers(group: dist.ProcessGroup | None = None) -> Peers:
    """The ranks of `group` (None: of the default group), which must be initialised.

    A background save talks to its peers from its own thread: give it a group that nothing else uses, such as
    `torch.distributed.new_group(backend="gloo")`, or its messages mix with those of the training.  A rank that dies
    is an error on the others after the time-out of the group.
    """
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    return _GroupPeers(group, device, dist.get_rank(group), dist.get_world_size(group))


@final
@attrs.frozen(eq=False)
class _GroupPeers:
    """JSON over all_gather: the lengths first, then the texts, padded to the longest."""

    group: dist.ProcessGroup | None
    device: torch.device  # where the group's backend wants tensors
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
