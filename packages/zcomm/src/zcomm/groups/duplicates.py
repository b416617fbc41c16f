"""Derived groups: a duplicate of a group, and smaller groups of its ranks.

Collectives of one group must be issued in one order on all ranks.  Two streams of them (weights, all-gathered when a
module needs them; gradients, reduced when they are ready) each keep their own order, but not the order between them.
A duplicate group carries the second stream.

`consecutive_group` cuts a group into equal parts of consecutive ranks, such as the ranks of one host or of one model
replica; `strided_group` takes one rank of each part.

All derived groups keep the order of the ranks of the original group, since slices are numbered by it.

Each is made on first use and kept with the original group: torch names groups by their ranks, and a group made again
under the same name would read keys that the first left in the store.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import ProcessGroup

from zcomm import compat
from zcomm.collectives.verbs import barrier, group_rank, group_size
from zcomm.shared import registry

__all__ = ["consecutive_group", "duplicate_group", "duplicate_host_group", "strided_group"]


def duplicate_group(group: ProcessGroup | None = None) -> ProcessGroup | None:
    """Return a second group of the ranks of `group`, in the same order; None at world size 1.

    A collective of those ranks on first use.  Ends with torch's default group.
    Raises ValueError, as `consecutive_group` and `strided_group` do, if torch would sort ranks that do not ascend.
    """
    if group_size(group) == 1:
        return None
    known = registry.derived_groups(group)
    if "duplicate" not in known:
        second = compat.new_group(_ranks(group))
        known["duplicate"] = second
        # the first collective of a group waits for all, so it comes before orders may differ
        for each in (group, second):
            barrier(each, label="duplicate_group")
    return known["duplicate"]


def duplicate_host_group(group: ProcessGroup | None = None) -> ProcessGroup | None:
    """Return a second group of the ranks of `group` over Gloo, for host tensors and for use from another thread.

    None at world size 1.  Collective and lifetime as for `duplicate_group`.
    """
    if group_size(group) == 1:
        return None
    known = registry.derived_groups(group)
    if "host duplicate" not in known:
        known["host duplicate"] = compat.new_group(_ranks(group), backend="gloo")
    return known["host duplicate"]


def consecutive_group(size: int, group: ProcessGroup | None = None) -> ProcessGroup | None:
    """Cut `group` into parts of `size` consecutive ranks; return the part of this rank.

    Returns `group` itself if `size` is its size.  A collective of its ranks on first use.
    Raises ValueError if `size` does not divide the number of ranks.
    """
    _check_divides(size, group)
    if size == group_size(group):
        return group
    first = group_rank(group) // size * size
    return _derived(group, f"consecutive {size}", _ranks(group)[first : first + size])


def strided_group(size: int, group: ProcessGroup | None = None) -> ProcessGroup | None:
    """Return the group of every `size`-th rank of `group`, including this one.

    It has one rank of each part of `size` consecutive ranks, at this rank's index in its part.  Returns `group`
    itself for size 1.  Collective and errors as for `consecutive_group`.

    Raises ValueError if `size` does not divide the group.
    """
    _check_divides(size, group)
    if size == 1:
        return group
    return _derived(group, f"strided {size}", _ranks(group)[group_rank(group) % size :: size])


def _derived(group: ProcessGroup | None, name: str, ranks: Sequence[int]) -> ProcessGroup:
    known = registry.derived_groups(group)
    if name not in known:
        known[name] = compat.new_group(ranks)
    return known[name]


def _ranks(group: ProcessGroup | None) -> list[int]:
    return list(range(dist.get_world_size())) if group is None else dist.get_process_group_ranks(group)


def _check_divides(size: int, group: ProcessGroup | None) -> None:
    total = group_size(group)
    if size < 1 or total % size:
        divisors = ", ".join(str(number) for number in range(1, total + 1) if total % number == 0)
        raise ValueError(f"parts of {size} ranks do not fill a group of {total}: choose one of {divisors}.")
