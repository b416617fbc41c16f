"""Model parallelism outside a partition: groups of ranks that hold other parts of the model, and addresses.

A tensor-parallel module holds a part of its weights; the ranks with the other parts see the same data and are this
rank's *model-parallel group*.  A partition works over the ranks that hold the same parts.  It needs three facts from
the modules (`ModelParallelModule`): the address of each parameter in the global tensor (for checkpoints), which
parameters are copies (their gradients count once in a norm), and the group over which such sums are reduced.

Experts differ (`ExpertShardedModule`): the ranks that share them see different data and belong to one partition.  An
expert-sharded parameter lives on some of its ranks only, and those sum its gradient.

A pipeline (`PipelineStagedModule`) cuts a model between its tensors: ranks of other stages have other parameter
names, and sums are reduced over the stages, too.

Modules of other libraries do not have the protocol's methods.  `describe_split` states the same facts about them in a
side table (weakly, by module), so that nothing is set on modules of a user.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, final, runtime_checkable

import attrs
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import zcomm
from zpartition.layout.address import Address

__all__ = [
    "ALONE",
    "ExpertShardedModule",
    "ModelParallelGroup",
    "ModelParallelModule",
    "PipelineStagedModule",
    "addresses_of",
    "check_expert_groups",
    "check_group",
    "describe_split",
    "expert_ranks_of",
    "expert_shards_of",
    "model_parallel_group_of",
    "pipeline_stages_of",
    "replicas_of",
]


@final
@attrs.frozen(eq=False)
class ModelParallelGroup:
    """Ranks that hold the other parts of this rank's tensors, and this rank's position among them."""

    group: ProcessGroup | None  # unused if `size` is 1
    size: int = 1
    rank: int = 0

    @classmethod
    def of(cls, group: ProcessGroup | None) -> ModelParallelGroup:
        """Return the model-parallel group of the ranks in `group`."""
        return cls(group, zcomm.group_size(group), zcomm.group_rank(group))

    def all_reduce(self, sums: Tensor) -> None:
        """All-reduce (sum) `sums` over the group, in place."""
        if self.size > 1:
            zcomm.all_reduce(sums, self.group, label="sums over model-parallel ranks")

    def __deepcopy__(self, memo: Mapping[int, Any]) -> ModelParallelGroup:
        """Return the group itself: a copy of a module communicates over the same group."""
        return self


ALONE = ModelParallelGroup(None)  # tensors are not split


@runtime_checkable
class ModelParallelModule(Protocol):
    """A module whose parameters are parts of global tensors."""

    mp_group: ModelParallelGroup

    def addresses(self) -> Mapping[str, Address]:
        """Return the addresses of its own parameters, by name in the module."""


@final
@attrs.frozen(eq=False)
class _Description:
    """The facts of a `ModelParallelModule` about a module that does not have its methods."""

    mp_group: ModelParallelGroup
    addresses: Mapping[str, Address]


_described: weakref.WeakKeyDictionary[nn.Module, _Description] = weakref.WeakKeyDictionary()


def describe_split(module: nn.Module, mp_group: ModelParallelGroup, addresses: Mapping[str, Address]) -> None:
    """State that `module` holds the parts at `addresses` (by its own parameters' names) of global tensors.

    For modules that are split by other code; the statement lives as long as the module, and a later one replaces it.
    """
    _described[module] = _Description(mp_group, dict(addresses))


def _split_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module, _Description]]:
    """Yield (name, module, description) of every module with addresses; an `ExpertShardedModule` has all facts."""
    for name, child in module.named_modules():
        own: object = child
        if hasattr(type(child), "addresses") and isinstance(own, ModelParallelModule):  # a protocol's test is slow
            yield name, child, _Description(own.mp_group, own.addresses())
        elif child in _described:
            yield name, child, _described[child]


@runtime_checkable
class ExpertShardedModule(Protocol):
    """A module whose experts are sharded over ranks with different data."""

    expert_group: ModelParallelGroup  # these ranks: consecutive in a partition
    mp_group: ModelParallelGroup  # tensor ranks with other parts of each expert; ALONE if experts are whole

    def addresses(self) -> Mapping[str, Address]:
        """Return the addresses of the sharded parameters, by name in the module (dotted for children)."""


def expert_shards_of(module: nn.Module) -> dict[str, ModelParallelGroup]:
    """Return the expert-parallel group of every expert-sharded parameter of `module`, by name.

    Parameters of a group of one rank are left out.
    """
    found = {
        id(child.get_parameter(name)): sharded.expert_group
        for child, sharded in _expert_sharded(module)
        for name in sharded.addresses()
    }
    params = module.named_parameters() if found else ()
    return {name: found[id(param)] for name, param in params if id(param) in found}


def expert_ranks_of(module: nn.Module) -> ModelParallelGroup:
    """Return the ranks that share the experts in `module`, also experts without parameters; ALONE if none do.

    If groups differ, the first is returned.
    """
    return next((sharded.expert_group for _, sharded in _expert_sharded(module)), ALONE)


def _expert_sharded(module: nn.Module) -> Iterator[tuple[nn.Module, ExpertShardedModule]]:
    """Yield (module, the same by its protocol) of those whose experts are over several ranks."""
    for child in module.modules():
        own: object = child
        if hasattr(type(child), "addresses") and isinstance(own, ExpertShardedModule) and own.expert_group.size > 1:
            yield child, own


@runtime_checkable
class PipelineStagedModule(Protocol):
    """A module that holds one pipeline stage: some of the layers of a model."""

    def stage_group(self) -> ModelParallelGroup:
        """Return the ranks of all stages, first to last, with this one.  A collective of these ranks."""


def pipeline_stages_of(module: nn.Module) -> ModelParallelGroup:
    """Return the group of pipeline stages of the model; ALONE if `module` is not a stage."""
    return module.stage_group() if isinstance(module, PipelineStagedModule) else ALONE


def model_parallel_group_of(module: nn.Module) -> ModelParallelGroup:
    """Return the tensor-parallel group of the modules inside `module`.  Raises ValueError if there are several."""
    split = ((name, described.mp_group) for name, _, described in _split_modules(module))
    found = {name: mp_group for name, mp_group in split if mp_group is not ALONE}
    first = next(iter(found), "")
    for name, mp_group in found.items():
        if mp_group.group is not found[first].group:
            raise ValueError(
                f"modules {first} and {name} are split over different groups ({found[first].size} and "
                f"{mp_group.size} ranks); a model has one tensor-parallel group. Use the same group for both."
            )
    return found[first] if found else ALONE


def check_group(module: nn.Module, group: ProcessGroup | None) -> None:
    """Raise ValueError if `group` has ranks that hold other parts of `module`: these cannot share a partition."""
    tensor, stages = model_parallel_group_of(module), pipeline_stages_of(module)
    neighbours = f"zcomm.strided_group({tensor.size}) for neighbours"
    for mp_group, kind, cure in (
        (tensor, "tensor", neighbours),
        (stages, "pipeline", "zpartition.replicas_of(module)"),
    ):
        others, mine = _ranks_of(mp_group), dist.get_rank() if mp_group.size > 1 else 0
        shared = sorted(set(dist.get_process_group_ranks(group)) & set(others) - {mine}) if others else []
        if shared:
            raise ValueError(
                f"the module is split over the {kind} ranks {others}, and the group to partition it over contains "
                f"rank {mine} and also {', '.join(map(str, shared))}, which hold other parts. Pass the "
                f"data-parallel group: group={cure}, or Groups.gradient()."
            )


def check_expert_groups(module: nn.Module, group: ProcessGroup | None) -> None:
    """Raise ValueError unless experts are sharded over consecutive ranks of `group`."""
    for name, expert_group in expert_shards_of(module).items():
        ranks, world = dist.get_process_group_ranks(expert_group.group), dist.get_process_group_ranks(group)
        at = world.index(dist.get_rank()) // expert_group.size * expert_group.size
        if ranks != world[at : at + expert_group.size] or len(world) % expert_group.size:
            raise ValueError(
                f"{name} is sharded over the expert-parallel ranks {ranks}, which are not {expert_group.size} "
                f"consecutive ranks of the group to partition over, {world}. Shard experts over "
                f"zcomm.consecutive_group({expert_group.size}, group), or Groups.experts()."
            )


def replicas_of(module: nn.Module) -> ProcessGroup | None:
    """Return the ranks that hold the same parts as this one, to partition over; None (all) for unsplit modules.

    The first call is a collective of these ranks.  Raises ValueError if tensor-parallel ranks are not consecutive.
    """
    mp_group, stages = model_parallel_group_of(module), pipeline_stages_of(module)
    if mp_group.size == stages.size == 1:
        return None
    ranks, rank, size = _ranks_of(mp_group), dist.get_rank(), dist.get_world_size()
    first = rank // mp_group.size * mp_group.size
    if ranks and (ranks != list(range(first, first + mp_group.size)) or size % mp_group.size):
        raise ValueError(
            f"the module is split over ranks {ranks} of {size}, which are not {mp_group.size} consecutive ranks, so "
            "the ranks with the same parts cannot be derived. Pass their group (mesh=, in zengine)."
        )
    return zcomm.Groups.of(zcomm.Degrees(pipeline=stages.size, tensor=mp_group.size)).gradient()


def _ranks_of(mp_group: ModelParallelGroup) -> list[int]:
    return dist.get_process_group_ranks(mp_group.group) if mp_group.size > 1 else []


def addresses_of(module: nn.Module) -> dict[str, Address]:
    """Return the address of every parameter of `module`, by name.

    A parameter that no module describes is a copy of the whole tensor on each model-parallel rank.
    """
    mp_group = model_parallel_group_of(module)
    declared: dict[int, Address] = {}
    for _, child, described in _split_modules(module):
        for name, address in described.addresses.items():
            if described.mp_group is ALONE:  # whole experts on every tensor rank
                address = attrs.evolve(address, num_copies=mp_group.size, copy=mp_group.rank)
            declared[id(child.get_parameter(name))] = address
    return {
        name: declared.get(id(param)) or Address.whole(param.shape, mp_group.size, mp_group.rank)
        for name, param in module.named_parameters()
    }
