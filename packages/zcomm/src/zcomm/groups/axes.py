"""Parallel dimensions of a run: degrees, the ranks along each dimension, and their groups.

    groups = Groups.of(Degrees(tensor=2, shard=-1), world_size)
    groups.tensor(), groups.data()         # process groups
    groups.get_model_parallel_group()      # the same, by the names of Megatron's `mpu`

Ranks are laid out from slowest to fastest as pipeline x replicate x shard x sequence x tensor: tensor ranks
communicate most and are neighbours.  *Data* ranks (replicate x shard) see different samples; *gradient* ranks (data
and sequence) sum gradients.  Expert ranks are no further axis: they are consecutive gradient ranks among which
experts are sharded, and *expert data* ranks hold the same experts.

Replicas may be *independent*: each group of ranks with equal position along `replicate` then trains by itself, with
gradient and expert ranks inside, and meets the others only in `across()`.

The layout is arithmetic and needs no processes.  A group is made on first use, by its ranks, and kept with the
default group, so all callers with the same ranks get the same group.
"""

from __future__ import annotations

import math
from typing import Any, Protocol, final

import attrs
import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from zcomm import compat
from zcomm.collectives.objects import all_gather_object
from zcomm.groups.mesh import resolve_sizes
from zcomm.shared import registry

__all__ = ["MPU_NAMES", "Degrees", "Groups", "ModelParallelUnit", "mpu_getter"]

_AXES = ("pipeline", "replicate", "shard", "sequence", "tensor")
_DATA, _GRADIENT = ("replicate", "shard"), ("replicate", "shard", "sequence")
MPU_NAMES = {  # axis -> its names in getters of an mpu, the first that exists counts
    # in Megatron-Core `model_parallel` has pipeline ranks, too
    "tensor": ("tensor_model_parallel", "slice_parallel", "model_parallel"),
    "pipeline": ("pipeline_model_parallel", "pipe_parallel"),
    "sequence": ("sequence_parallel", "context_parallel"),
    "expert": ("expert_model_parallel",),
}
_ALIASES = {  # common names of the axes
    **dict.fromkeys(("pp", "pipe", "pipeline_parallel"), "pipeline"),
    "dp_replicate": "replicate",
    **dict.fromkeys(("dp", "dp_shard", "fsdp", "data", "data_parallel"), "shard"),
    **dict.fromkeys(("sp", "cp", "sequence_parallel"), "sequence"),
    **dict.fromkeys(("tp", "model", "tensor_parallel"), "tensor"),
}


@attrs.frozen(kw_only=True)
class Degrees:
    """Number of ranks along each dimension; one may be -1 and is inferred (shard, unless it is given)."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = -1
    sequence: int = 1
    tensor: int = 1
    expert: int = 1  # must divide the gradient ranks, replicate x shard x sequence

    def resolved(self, world_size: int) -> Degrees:
        """Fill in -1.  Pure.  Raises ValueError, with the equation, if they do not multiply to `world_size`."""
        sizes = resolve_sizes({axis: getattr(self, axis) for axis in _AXES}, world_size)
        gradient = math.prod(sizes[axis] for axis in _GRADIENT)
        if self.expert < 1 or gradient % self.expert:
            equation = " x ".join(f"{axis}={sizes[axis]}" for axis in _GRADIENT)
            divisors = ", ".join(str(number) for number in range(1, gradient + 1) if gradient % number == 0)
            raise ValueError(
                f"expert={self.expert} must divide the {gradient} ranks that sum gradients ({equation}): experts are "
                f"sharded among those. Choose one of {divisors}."
            )
        return attrs.evolve(self, **sizes)


class ModelParallelUnit(Protocol):
    """The required part of Megatron's `mpu`, besides a getter of tensor groups."""

    def get_data_parallel_group(self) -> ProcessGroup: ...


def mpu_getter(mpu: object, axis: str, what: str) -> str:
    """Return the name of an mpu's getter of the "group", "world_size" or "rank" along `axis`; "" if it has none.

    axis: a key of MPU_NAMES.
    """
    getters = (f"get_{name}_{what}" for name in MPU_NAMES[axis])
    return next((getter for getter in getters if hasattr(mpu, getter)), "")


@final
@attrs.define(eq=False)
class Groups:
    """Groups of one rank; usable as an `mpu`.

    Invariant: `table` has each rank of the world once, one dim for each of `axes`.
    """

    axes: tuple[str, ...]
    table: NDArray[np.int64]  # global ranks
    rank: int  # global rank of this process
    expert: int = 1  # degree
    given: dict[tuple[int, ...], ProcessGroup] = attrs.field(factory=dict)  # by their ranks: groups made elsewhere
    independent: bool = False  # no gradients are summed along `replicate`

    @classmethod
    def of(cls, degrees: Degrees, world_size: int | None = None, rank: int | None = None) -> Groups:
        """Lay out ranks in order.  `world_size` and `rank` default to torch's.

        Raises ValueError as `Degrees.resolved`.
        """
        size = (dist.get_world_size() if dist.is_initialized() else 1) if world_size is None else world_size
        mine = (dist.get_rank() if dist.is_initialized() else 0) if rank is None else rank
        found = degrees.resolved(size)
        table = np.arange(size).reshape([getattr(found, axis) for axis in _AXES])
        return cls(_AXES, table, mine, found.expert)

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh, expert: int = 1) -> Groups:
        """Take the axes of a mesh, in any order, by our names or usual short ones (pp, dp, sp, tp, ...).

        Missing axes have one rank.  A single axis needs no name: it is `shard`.  Raises ValueError for unknown axes,
        or if `expert` does not fit.
        """
        names = tuple(_ALIASES.get(name, name) for name in mesh.mesh_dim_names or ("shard",) * (mesh.ndim == 1))
        if unknown := [name for name in names if name not in _AXES] or ([] if names else ["none named"]):
            raise ValueError(f"the mesh has axes {', '.join(unknown)}; allowed are {', '.join(_AXES)}.")
        if len(set(names)) < len(names):
            raise ValueError(f"the mesh has axes {mesh.mesh_dim_names}, two of which are {names}: name each once.")
        sizes = {axis: mesh.size(names.index(axis)) if axis in names else 1 for axis in _AXES}
        Degrees(**sizes, expert=expert).resolved(mesh.size())
        found = cls(names, mesh.mesh.cpu().numpy().astype(np.int64), dist.get_rank(), expert)
        found.given = {found.ranks(name): mesh.get_group(dim) for dim, name in enumerate(names)}
        return found

    @classmethod
    def from_mpu(cls, mpu: ModelParallelUnit) -> Groups:
        """Take tensor and data ranks from an `mpu`.  A collective of the world.

        Raises ValueError if its groups are not the rows and columns of a table of all ranks.
        """
        getter = mpu_getter(mpu, "tensor", "group")
        tensor, data = getattr(mpu, getter)(), mpu.get_data_parallel_group()
        rows: list[list[int]] = all_gather_object(dist.get_process_group_ranks(tensor))
        table = sorted({tuple(row) for row in rows})
        columns = sorted(zip(*table))
        if len({len(row) for row in table}) != 1 or tuple(dist.get_process_group_ranks(data)) not in columns:
            raise ValueError(
                f"the groups {table} of mpu.{getter}() and the data-parallel group "
                f"{dist.get_process_group_ranks(data)} are not the rows and a column of one table of ranks."
            )
        found = cls(("shard", "tensor"), np.array(table), dist.get_rank())
        found.given = {tuple(dist.get_process_group_ranks(group)): group for group in (tensor, data)}
        return found

    def split_over(self, tensor: ProcessGroup) -> Groups:
        """Add the tensor axis of group `tensor` to data ranks that were given without one.  A collective of `tensor`.

        Raises ValueError if other tensor ranks, or ranks of further axes, were given.
        """
        tensor_ranks = tuple(dist.get_process_group_ranks(tensor))
        if (named := self.ranks("tensor")) == tensor_ranks:
            self.given[tensor_ranks] = tensor
            return self
        if "tensor" in self.axes or self.table.size != len(self.ranks(*_DATA)):
            raise ValueError(
                f"the model is split over ranks {list(tensor_ranks)}, but its tensor ranks were given as "
                f"{list(named)}: split it over the group of that axis."
            )
        columns = all_gather_object(self.table.reshape(-1).tolist(), tensor)
        found = Groups(("shard", "tensor"), np.array(columns).T, self.rank, self.expert, dict(self.given))
        found.given[tensor_ranks] = tensor
        return found

    # -- ranks -----------------------------------------------------------------------------------

    def ranks(self, *axes: str) -> tuple[int, ...]:
        """Global ranks that differ from this one along `axes` only, in order, including this one."""
        here = np.argwhere(self.table == self.rank)[0]
        index = tuple(slice(None) if axis in axes else int(at) for axis, at in zip(self.axes, here))
        return tuple(self.table[index].reshape(-1).tolist())

    def gradient_ranks(self) -> tuple[int, ...]:
        """Global ranks that sum gradients of non-expert parameters."""
        return self.ranks(*_GRADIENT[self.independent :])

    def replica_ranks(self) -> tuple[int, ...]:
        """Global ranks that train together: those of this replica if replicas are independent, else all."""
        return tuple(sorted(self.ranks(*(axis for axis in _AXES if axis != "replicate" or not self.independent))))

    def expert_ranks(self) -> tuple[int, ...]:
        """Global ranks among which this rank's experts are sharded."""
        all_ranks = self.gradient_ranks()
        first = all_ranks.index(self.rank) // self.expert * self.expert
        return all_ranks[first : first + self.expert]

    def expert_data_ranks(self) -> tuple[int, ...]:
        """Global ranks that hold the same experts and sum their gradients."""
        all_ranks = self.gradient_ranks()
        return all_ranks[all_ranks.index(self.rank) % self.expert :: self.expert]

    # -- groups ----------------------------------------------------------------------------------

    def group(self, ranks: tuple[int, ...]) -> ProcessGroup | None:
        """Return the group of these ranks; None without torch.distributed."""
        if not dist.is_initialized():
            return None
        if ranks in self.given:
            return self.given[ranks]
        if ranks == tuple(range(dist.get_world_size())):
            return dist.group.WORLD
        known = registry.derived_groups(None)
        if (name := f"ranks {ranks}") not in known:
            known[name] = compat.new_group(ranks)
        return known[name]

    def world(self) -> ProcessGroup | None:
        """All ranks of the table."""
        return self.group(tuple(sorted(self.table.reshape(-1).tolist())))

    def tensor(self) -> ProcessGroup | None:
        """Ranks that hold shards of the same layers."""
        return self.group(self.ranks("tensor"))

    def sequence(self) -> ProcessGroup | None:
        """Ranks that hold parts of the same samples."""
        return self.group(self.ranks("sequence"))

    def pipeline(self) -> ProcessGroup | None:
        """Stages, first to last."""
        return self.group(self.ranks("pipeline"))

    def data(self) -> ProcessGroup | None:
        """Ranks that see different samples."""
        return self.group(self.ranks(*_DATA))

    def gradient(self) -> ProcessGroup | None:
        """Ranks that sum gradients of non-expert parameters: the `group` of `zpartition.shard`."""
        return self.group(self.gradient_ranks())

    def replica(self) -> ProcessGroup | None:
        """Group of `replica_ranks`."""
        return self.group(self.replica_ranks())

    def across(self) -> ProcessGroup | None:
        """Ranks of equal index in all replicas."""
        return self.group(self.ranks("replicate"))

    def experts(self) -> ProcessGroup | None:
        """Group of `expert_ranks`."""
        return self.group(self.expert_ranks())

    def expert_data(self) -> ProcessGroup | None:
        """Group of `expert_data_ranks`."""
        return self.group(self.expert_data_ranks())

    # -- names of Megatron and DeepSpeed ---------------------------------------------------------

    get_tensor_model_parallel_group = get_model_parallel_group = get_slice_parallel_group = tensor
    get_sequence_parallel_group, get_pipe_parallel_group = sequence, pipeline
    get_pipeline_model_parallel_group, get_data_parallel_group = pipeline, data
    get_sequence_data_parallel_group, get_expert_parallel_group = gradient, experts
    get_expert_data_parallel_group = expert_data

    def __getattr__(self, name: str) -> Any:
        """Provide `get_X_world_size()` and `get_X_rank()` of every `get_X_group()`."""
        for ending in ("_world_size", "_rank"):
            stem = name.removesuffix(ending)
            if stem != name and (of := _RANKS.get(stem)) is not None:
                ranks = of(self)
                return lambda: len(ranks) if ending == "_world_size" else ranks.index(self.rank)
        raise AttributeError(f"Groups has no {name!r}")


_RANKS: dict[str, Any] = {
    "get_model_parallel": lambda groups: groups.ranks("tensor"),
    "get_slice_parallel": lambda groups: groups.ranks("tensor"),
    "get_tensor_model_parallel": lambda groups: groups.ranks("tensor"),
    "get_sequence_parallel": lambda groups: groups.ranks("sequence"),
    "get_pipe_parallel": lambda groups: groups.ranks("pipeline"),
    "get_pipeline_model_parallel": lambda groups: groups.ranks("pipeline"),
    "get_data_parallel": lambda groups: groups.ranks(*_DATA),
    "get_sequence_data_parallel": lambda groups: groups.gradient_ranks(),
    "get_expert_parallel": lambda groups: groups.expert_ranks(),
    "get_expert_data_parallel": lambda groups: groups.expert_data_ranks(),
}
