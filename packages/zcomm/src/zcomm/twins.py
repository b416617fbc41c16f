"""A second group of the same ranks, for messages whose order among the first one's is not the same on all ranks.

Collectives of one group have to be issued in one order everywhere.  Two streams of them (weights that come when a
module needs them, gradients that go when they are there) keep their order each by itself, but not between them.

A group has one twin, made when it is first asked for and kept with it: torch names groups after their ranks, and one
that is made again under the same name meets what the first has left in the store.
"""

from __future__ import annotations

import weakref

import torch.distributed as dist
from torch.distributed import ProcessGroup

from zcomm.collectives import barrier, group_size

__all__ = ["twin"]

_twins: weakref.WeakKeyDictionary[ProcessGroup, ProcessGroup] = weakref.WeakKeyDictionary()


def twin(group: ProcessGroup | None = None) -> ProcessGroup | None:
    """The second group of the ranks of `group`, in the same order; None at world size 1.

    A collective of those ranks when it is first asked for.  It ends when torch's default group does.
    """
    if group_size(group) == 1:
        return None
    first = dist.group.WORLD if group is None else group
    assert first is not None
    if first not in _twins:
        is_world = first is dist.group.WORLD
        ranks = None if is_world else dist.get_process_group_ranks(first)
        _twins[first] = dist.new_group(ranks, use_local_synchronization=not is_world)
        for each in (first, _twins[first]):  # a group's first collective waits for all: not where orders may cross
            barrier(each, label="twins")
    return _twins[first]
