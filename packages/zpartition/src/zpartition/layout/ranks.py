"""Process groups of one partition.

Weights are sharded over *shard groups*: consecutive ranks that together hold one copy.  If a shard group is smaller
than the world (hybrid sharding; MiCS, Zhang et al. 2022, section 3), ranks at the same position of all shard groups
are *replicas*: weights are gathered inside a shard group only, over the fast links; gradients are reduce-scattered
inside the shard group, then summed over the replicas.

Experts are sharded over consecutive ranks (model_parallel.py), so a bucket of expert parameters lives on its
*holders*: one rank of each run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import final

import attrs
from torch.distributed import ProcessGroup

import zcomm
from zpartition.layout.layout import Bucket
from zpartition.layout.policy import ZeroPolicy

__all__ = ["Ranks"]


@final
@attrs.frozen(eq=False)
class Ranks:
    """Groups of this rank.  None as a group is the default group of torch, or a world of one."""

    world: ProcessGroup | None  # all ranks that train this model: gradients are averaged over them
    shard: ProcessGroup | None  # ranks that hold one copy; `world` unless sharding is hybrid
    replicas: ProcessGroup | None  # ranks that hold the same span; unused if `num_replicas` is 1
    num_shards: int  # of `shard`
    holders: Mapping[int, Ranks] = attrs.field(factory=dict)  # of experts, by the number of their shards
    rank: int = attrs.field(init=False)  # of this process in `world`
    size: int = attrs.field(init=False)  # of `world`

    @rank.default
    def _rank(self) -> int:
        return zcomm.group_rank(self.world)

    @size.default
    def _size(self) -> int:
        return zcomm.group_size(self.world)

    @classmethod
    def of(cls, world: ProcessGroup | None, policy: ZeroPolicy, expert_shards: Iterable[int] = ()) -> Ranks:
        """Create the groups of `policy`; a collective.  Raises ValueError if its shard groups do not fit.

        expert_shards: the numbers of ranks that experts are sharded over.
        """
        found = cls._of(world, policy)
        holders = {
            number: cls._of(zcomm.strided_group(number, world), _holder_policy(policy, number))
            for number in sorted(set(expert_shards))
        }
        return attrs.evolve(found, holders=holders)

    @classmethod
    def _of(cls, world: ProcessGroup | None, policy: ZeroPolicy) -> Ranks:
        size = shard_group_size(policy, zcomm.group_size(world))
        for field in ("secondary_group_size", "gradient_hop_size"):
            _check_divides(field, getattr(policy, field), size)
        if size == zcomm.group_size(world):
            return cls(world, world, None, size)
        return cls(world, zcomm.consecutive_group(size, world), zcomm.strided_group(size, world), size)

    def duplicate(self) -> Ranks:
        """Return the same ranks in duplicate groups, for a second stream of messages; a collective."""
        return attrs.evolve(
            self,
            world=zcomm.duplicate_group(self.world) or self.world,
            shard=zcomm.duplicate_group(self.shard) or self.shard,
            replicas=self.replicas and zcomm.duplicate_group(self.replicas),
            holders={num_expert_shards: ranks.duplicate() for num_expert_shards, ranks in self.holders.items()},
        )

    def groups_for(self, bucket: Bucket) -> Ranks:
        """Return the groups of the ranks that hold the parameters of `bucket`: all ranks, except for experts."""
        return self if bucket.num_expert_shards == 1 else self.holders[bucket.num_expert_shards]

    @property
    def num_replicas(self) -> int:
        """Number of ranks that hold each span."""
        return self.size // self.num_shards


def shard_group_size(policy: ZeroPolicy, world_size: int) -> int:
    """Return the number of ranks that hold one copy.  Raises ValueError if it does not divide `world_size`."""
    size = policy.shard_group_size or world_size
    if world_size % size:
        divisors = ", ".join(str(number) for number in range(1, world_size + 1) if world_size % number == 0)
        raise ValueError(
            f"shard_group_size {size} does not divide the world size {world_size}: choose one of {divisors}, or 0 "
            "for one group of all ranks."
        )
    return size


def _holder_policy(policy: ZeroPolicy, num_expert_shards: int) -> ZeroPolicy:
    """Return the policy for the holders of expert parameters, which are fewer; see `ZeroPolicy.of`."""
    size = policy.shard_group_size // num_expert_shards
    return attrs.evolve(policy, shard_group_size=size, secondary_group_size=0, gradient_hop_size=0)


def _check_divides(field: str, run: int, num_shards: int) -> None:
    """Raise ValueError if `run` consecutive ranks do not divide the ranks of one copy; ignored without sharding."""
    if run > 1 and num_shards > 1 and num_shards % run:
        divisors = ", ".join(str(number) for number in range(2, num_shards + 1) if num_shards % number == 0)
        raise ValueError(
            f"{field} {run} does not divide the {num_shards} ranks that hold one copy: choose one of {divisors}, "
            "or 0 to leave it out."
        )
