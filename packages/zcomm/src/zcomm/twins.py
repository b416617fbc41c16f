"""Groups made from a group: a second one of the same ranks, and smaller ones.

A twin is for messages whose order among the first group's is not the same on all ranks.  Collectives of one group
have to be issued in one order everywhere.  Two streams of them (weights that come when a module needs them, gradients
that go when they are there) keep their order each by itself, but not between them.

Runs cut a group into equal parts of consecutive ranks: the ranks of one host, or those that hold one copy of a model.

All keep the order of the ranks of the group that they are made from, where slices are counted by it.

Each is made when it is first asked for and kept with the group it came from: torch names groups after their ranks,
and one that is made again under the same name meets what the first has left in the store.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import ProcessGroup

from zcomm import compat
from zcomm.collectives import barrier, group_rank, group_size
from zcomm.shared import registry

__all__ = ["host_twin", "run", "run_mates", "twin"]


def twin(group: ProcessGroup | None = None) -> ProcessGroup | None:
    """The second group of the ranks of `group`, in the same order; None at world size 1.

    A collective of those ranks when it is first asked for.  It ends when torch's default group does.
    Raises ValueError, as `run` and `run_mates` do, where torch would sort the ranks of a group that do not ascend.
    """
    if group_size(group) == 1:
        return None
    kin = registry.kin(group)
    if "twin" not in kin:
        second = compat.new_group(_ranks(group))
        kin["twin"] = second
        for each in (group, second):  # a group's first collective waits for all: not where orders may cross
            barrier(each, label="twins")
    return kin["twin"]


def host_twin(group: ProcessGroup | None = None) -> ProcessGroup | None:
    """The ranks of `group` once more, over Gloo: for a thread of its own, which talks about files, say.

    None at world size 1.  Collective and end as for `twin`.
    """
    if group_size(group) == 1:
        return None
    kin = registry.kin(group)
    if "host twin" not in kin:
        kin["host twin"] = compat.new_group(_ranks(group), backend="gloo")
    return kin["host twin"]


def run(size: int, group: ProcessGroup | None = None) -> ProcessGroup | None:
    """The ranks of `group` in runs of `size` consecutive ones: this rank's run.

    All of them are `group` itself.  A collective of its ranks when it is first asked for.
    Raises ValueError if `size` does not divide the number of ranks.
    """
    _refuse_uneven(size, group)
    if size == group_size(group):
        return group
    first = group_rank(group) // size * size
    return _kept(group, f"run of {size}", _ranks(group)[first : first + size])


def run_mates(size: int, group: ProcessGroup | None = None) -> ProcessGroup | None:
    """One rank from each run of `size`, in the order of the runs: those at the same place as this one.

    With runs of one they are `group` itself.  Collective and errors as for `run`.
    """
    _refuse_uneven(size, group)
    if size == 1:
        return group
    return _kept(group, f"mates in runs of {size}", _ranks(group)[group_rank(group) % size :: size])


def _kept(group: ProcessGroup | None, name: str, ranks: Sequence[int]) -> ProcessGroup:
    kin = registry.kin(group)
    if name not in kin:
        kin[name] = compat.new_group(ranks)
    return kin[name]


def _ranks(group: ProcessGroup | None) -> list[int]:
    return list(range(dist.get_world_size())) if group is None else dist.get_process_group_ranks(group)


def _refuse_uneven(size: int, group: ProcessGroup | None) -> None:
    total = group_size(group)
    if size < 1 or total % size:
        divisors = ", ".join(str(number) for number in range(1, total + 1) if total % number == 0)
        raise ValueError(f"runs of {size} ranks do not fill a group of {total}: choose one of {divisors}.")
