"""The groups that one partition communicates in.

Weights are cut over *shard groups*: runs of consecutive ranks that together hold one copy of what is sharded.  When a
run is smaller than the world (hybrid sharding; MiCS, Zhang et al. 2022, section 3), the ranks at the same place in
all runs are *replicas* of each other: weights are gathered inside a run only, over the fast links, and the gradients
of a span are summed over its replicas after they were scattered inside the run.

Experts are dealt out to runs of ranks (cells.py), so a bucket of theirs lives over its *holders*: one rank of each
run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import final

import attrs
from torch.distributed import ProcessGroup

import zcomm
from zpartition.layout import Bucket
from zpartition.policy import ZeroPolicy

__all__ = ["Ranks"]


@final
@attrs.frozen(eq=False)
class Ranks:
    """Who takes part, seen from one rank.  None as a group is torch's default one, or a world of one."""

    world: ProcessGroup | None  # all that train this model: gradients are averaged over them
    shard: ProcessGroup | None  # those that hold one copy; `world` unless sharding is hybrid
    replicas: ProcessGroup | None  # those that hold the same span; only looked at where `num_replicas` > 1
    num_shards: int  # of `shard`
    holders: Mapping[int, Ranks] = attrs.field(factory=dict)  # of what is dealt out to runs of that many ranks
    rank: int = attrs.field(init=False)  # this process among all
    size: int = attrs.field(init=False)  # the number of all

    @rank.default
    def _rank(self) -> int:
        return zcomm.group_rank(self.world)

    @size.default
    def _size(self) -> int:
        return zcomm.group_size(self.world)

    @classmethod
    def of(cls, world: ProcessGroup | None, policy: ZeroPolicy, deals: Iterable[int] = ()) -> Ranks:
        """The groups that `policy` asks for; a collective.  Raises ValueError if its shard groups do not fit.

        deals: into runs of how many ranks parameters are dealt out.
        """
        found = cls._of(world, policy)
        holders = {deal: cls._of(zcomm.run_mates(deal, world), _dealt(policy, deal)) for deal in sorted(set(deals))}
        return attrs.evolve(found, holders=holders)

    @classmethod
    def _of(cls, world: ProcessGroup | None, policy: ZeroPolicy) -> Ranks:
        size = shard_group_size(policy, zcomm.group_size(world))
        for field in ("secondary_group_size", "gradient_hop_size"):
            _refuse_uneven(field, getattr(policy, field), size)
        if size == zcomm.group_size(world):
            return cls(world, world, None, size)
        return cls(world, zcomm.run(size, world), zcomm.run_mates(size, world), size)

    def twins(self) -> Ranks:
        """The same ranks in groups of their own, for a second stream of messages; a collective."""
        return attrs.evolve(
            self,
            world=zcomm.twin(self.world) or self.world,
            shard=zcomm.twin(self.shard) or self.shard,
            replicas=self.replicas and zcomm.twin(self.replicas),
            holders={deal: ranks.twins() for deal, ranks in self.holders.items()},
        )

    def having(self, bucket: Bucket) -> Ranks:
        """Those that hold the parameters of `bucket`: all, unless it is dealt out."""
        return self if bucket.deal == 1 else self.holders[bucket.deal]

    @property
    def num_replicas(self) -> int:
        """How many hold each span."""
        return self.size // self.num_shards


def shard_group_size(policy: ZeroPolicy, world_size: int) -> int:
    """The ranks that hold one copy.  Raises ValueError if the policy's do not divide `world_size`."""
    size = policy.shard_group_size or world_size
    if world_size % size:
        divisors = ", ".join(str(number) for number in range(1, world_size + 1) if world_size % number == 0)
        raise ValueError(
            f"shard_group_size {size} does not divide the world size {world_size}: choose one of {divisors}, or 0 "
            "for one group of all ranks."
        )
    return size


def _dealt(policy: ZeroPolicy, deal: int) -> ZeroPolicy:
    """What `policy` asks of the holders, who are fewer; see `ZeroPolicy.of`."""
    size = policy.shard_group_size // deal
    return attrs.evolve(policy, shard_group_size=size, secondary_group_size=0, gradient_hop_size=0)


def _refuse_uneven(field: str, run: int, num_shards: int) -> None:
    """Runs of neighbours inside a copy fill it; where nothing is sharded, nobody looks."""
    if run > 1 and num_shards > 1 and num_shards % run:
        divisors = ", ".join(str(number) for number in range(2, num_shards + 1) if num_shards % number == 0)
        raise ValueError(
            f"{field} {run} does not divide the {num_shards} ranks that hold one copy: choose one of {divisors}, "
            "or 0 to leave it out."
        )
