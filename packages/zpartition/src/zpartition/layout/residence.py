"""Residence: how many elements of stage 3's units may be whole at once; a pure plan.

Problem.  Whole units are what stage 3 exists to avoid, and a step waits whenever the next unit is not whole in time.

Design.  By default a rank holds what a step without waiting needs and no more: the unit that is called, those whose
calls enclose it, and the one after it, which is gathered meanwhile.  The largest of these sums over all neighbours
bounds forward and backward alike.  A unit stays after its call only if its next use would have it gathered at once.
Where even this takes as much memory as sharding saves (few large units on two ranks), units are gathered ahead only
as far as the largest call leaves room.

`policy.max_live_numel` replaces this by a number of elements, as in DeepSpeed: units stay after forward until the
limit is reached, and backward need not gather them again.

Rejected.  DeepSpeed's default limit of a billion elements: it keeps most models whole, so that stage 3 needs more
memory than stage 2.  Two of the largest unit: an embedding that is called once would count twice for all others.
"""

from __future__ import annotations

import collections
from collections.abc import Container, Iterable, Mapping

import attrs
from torch import nn

from zpartition.layout.layout import Bucket
from zpartition.layout.policy import ZeroPolicy
from zpartition.layout.units import nested_numel

__all__ = ["NO_RESIDENCE", "Residence", "enclosing_units", "residence", "unit_numels", "working_numel"]


@attrs.frozen
class Residence:
    """Limits of whole units, in elements."""

    stay_numel: int  # all units may stay after forward until they exceed this
    ahead_numel: int  # no unit is gathered before its use beyond this
    backward_numel: int  # of units used in backward, before the least recently used are released
    next_numel: int = 0  # units that would be gathered again at once stay until they exceed this

    @property
    def most_numel(self) -> int:
        """Maximum of whole units."""
        return max(self.stay_numel, self.backward_numel)


NO_RESIDENCE = Residence(0, 0, 0)


def residence(units: Mapping[str, int], policy: ZeroPolicy, num_shards: int) -> Residence:
    """Return the limits for units of `num_shards` shards, by name: elements, in the order of their modules."""
    if policy.max_live_numel is None:
        total, needed = sum(units.values()), working_numel(units)
        if needed >= total - total // num_shards:
            needed = nested_numel(units)
        return Residence(stay_numel=0, ahead_numel=needed, backward_numel=needed, next_numel=needed)
    limit, largest = policy.max_live_numel, max(units.values(), default=0)
    return Residence(
        stay_numel=limit,
        ahead_numel=max(limit, 2 * largest),
        backward_numel=max(limit, nested_numel(units) + largest),
    )


def working_numel(units: Mapping[str, int]) -> int:
    """Return the most elements of two units in succession and of all whose calls enclose them."""
    chains = [enclosing_units(name, units) for name in units]
    pairs = zip(chains, [*chains[1:], *chains[-1:]])
    return max((sum(units[name] for name in first | second) for first, second in pairs), default=0)


def enclosing_units(name: str, units: Container[str]) -> set[str]:
    """Return the units whose calls enclose that of `name`, itself included."""
    parts = name.split(".")
    return {path for count in range(len(parts) + 1) if (path := ".".join(parts[:count])) in units}


def unit_numels(module: nn.Module, buckets: Iterable[Bucket]) -> dict[str, int]:
    """Return the elements of each unit in `buckets`, padding included, in the order of the modules."""
    found: collections.Counter[str] = collections.Counter()
    for bucket in buckets:
        if bucket.unit is not None:
            found[bucket.unit] += bucket.numel
    return {name: found[name] for name, _ in module.named_modules() if name in found}
