"""`deepspeed.runtime.pipe.topology`: grids of ranks, and the process groups of a grid."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, final

from zcomm import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology
from zengine.deepspeed.comm.world import (
    destroy_process_group,
    get_rank,
    get_world_size,
    is_initialized,
    new_group,
)
from zengine.features import Feature

__all__ = [
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineParallelGrid",
    "ProcessTopology",
]


def _prime_factors(number: int) -> list[int]:
    """Return the prime factors in ascending order.  Raises ValueError below 1."""
    if number < 1:
        raise ValueError(f"_prime_factors({number}): give an integer of at least 1")
    found, candidate = [], 2
    while number > 1:
        while number % candidate == 0:
            found.append(candidate)
            number //= candidate
        candidate += 1
    return found


@final
class PipelineParallelGrid:
    """Process groups along the axes of a topology, with the methods of an `mpu`.

    topology: axes "pipe" and "data", and "model" if layers are split; default: the prime factors of the world size
    in turns.  "Model parallel" here means all ranks of one replica: "pipe" and "model" together; the ranks that split
    a layer are "slice" or "tensor model" parallel.  Making a grid is a collective of all ranks.

    Raises ValueError if the topology does not have as many ranks as the world.
    """

    def __init__(self, topology: ProcessTopology | None = None, process_group: Any = None) -> None:
        """Make the groups.  process_group is ignored, as in DeepSpeed."""
        self.global_rank, self.world_size = get_rank(), get_world_size()
        self._topo = _squarish(self.world_size) if topology is None else topology
        if not self._is_grid_valid():
            raise ValueError(
                f"the grid {self._topo} has {self._topo.world_size()} ranks and the world {self.world_size}: give "
                "sizes whose product is the number of ranks"
            )
        self.data_parallel_size = max(self._topo.get_dim("data"), 1)
        self.pipe_parallel_size = max(self._topo.get_dim("pipe"), 1)
        self.model_parallel_size = self.slice_parallel_size = max(self._topo.get_dim("model"), 1)
        self.stage_id, self.data_parallel_id = self.get_stage_id(), self.get_data_parallel_id()
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1
        self._made: list[Any] = []  # groups of this rank
        self._make_groups()

    def close(self) -> None:
        """Destroy the groups of this rank."""
        while self._made and is_initialized():
            destroy_process_group(self._made.pop())

    def _make_groups(self) -> None:
        replicas = [sorted(self._topo.get_axis_list("data", index)) for index in range(self.data_parallel_size)]
        ranks, self.ds_model_proc_group = self._own_group(replicas)
        self.ds_model_world_size, self.ds_model_rank = len(ranks), ranks.index(self.global_rank)
        self.dp_groups = self._topo.get_axis_comm_lists("data")
        self.dp_group, self.dp_proc_group = self._own_group(self.dp_groups)
        self.pipe_groups = self._topo.get_axis_comm_lists("pipe")
        self.pp_group, self.pp_proc_group = self._own_group(self.pipe_groups)
        self.p2p_groups = self._build_p2p_groups()
        self.model_groups = self._topo.get_axis_comm_lists("model") or [[rank] for rank in range(self.world_size)]
        self.slice_group, self.slice_proc_group = self._own_group(self.model_groups)

    def _own_group(self, lists: Sequence[list[int]]) -> tuple[list[int], Any]:
        """Make a group of each list; return the ranks and the group of this rank's."""
        made = [(ranks, new_group(ranks)) for ranks in lists]
        self._made += [group for ranks, group in made if self.global_rank in ranks]
        return next((ranks, group) for ranks, group in made if self.global_rank in ranks)

    def _build_p2p_groups(self) -> list[list[int]]:
        """Return [rank, rank of the next stage] for each rank; the first stage follows the last one."""
        following: dict[int, int] = {}
        for ranks in self.pipe_groups:
            following.update(zip(ranks, [*ranks[1:], ranks[0]]))
        return [[rank, following[rank]] for rank in range(self.world_size)]

    def _is_grid_valid(self) -> bool:
        return self._topo.world_size() == self.world_size

    def topology(self) -> ProcessTopology:
        """Return the topology."""
        return self._topo

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """Return the rank of a stage in this rank's pipeline, or with other coordinates given by name."""
        coordinates = self._topo.get_coord(self.global_rank)._asdict() | {"pipe": stage_id, **kwargs}
        return self._topo.get_rank(**coordinates)

    def get_global_rank(self) -> int:
        """Return this process's rank in the world."""
        return self.global_rank

    def get_stage_id(self) -> int:
        """Return the stage of this rank, from 0."""
        return int(self._topo.get_coord(self.global_rank).pipe)

    def get_data_parallel_id(self) -> int:
        """Return the replica of this rank, from 0."""
        return int(self._topo.get_coord(self.global_rank).data)

    def get_pipe_parallel_world_size(self) -> int:
        """Return the number of stages."""
        return self.pipe_parallel_size

    def get_pipe_parallel_group(self) -> Any:
        """Return the group of the stages of this rank's pipeline."""
        return self.pp_proc_group

    def get_data_parallel_rank(self) -> int:
        """Return the replica of this rank, from 0."""
        return self.data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        """Return the number of replicas."""
        return self.data_parallel_size

    def get_data_parallel_group(self) -> Any:
        """Return the group of the replicas of this rank's stage."""
        return self.dp_proc_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Return the ranks of that group."""
        return self.dp_group

    def get_model_parallel_rank(self) -> int:
        """Return this rank's index among the ranks of its replica."""
        return self.ds_model_rank

    def get_model_parallel_world_size(self) -> int:
        """Return the number of ranks of a replica."""
        return self.ds_model_world_size

    def get_model_parallel_group(self) -> Any:
        """Return the group of the ranks of this replica."""
        return self.ds_model_proc_group

    def get_slice_parallel_rank(self) -> int:
        """Return this rank's index among those that split its layers."""
        return int(getattr(self._topo.get_coord(self.global_rank), "model", 0))

    def get_slice_parallel_world_size(self) -> int:
        """Return the number of ranks that split a layer."""
        return self.slice_parallel_size

    def get_slice_parallel_group(self) -> Any:
        """Return the group of the ranks that split this rank's layers."""
        return self.slice_proc_group

    get_pipe_parallel_rank = get_pipeline_model_parallel_rank = get_stage_id
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size
    get_pipeline_model_parallel_group = get_pipe_parallel_group
    get_tensor_model_parallel_rank = get_slice_parallel_rank
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size
    get_tensor_model_parallel_group = get_slice_parallel_group


@final
class PipelineGrid(Feature):
    """`engine.grid` of a pipeline, and `module.mpu()`; its groups end with the engine.

    One that `module.mpu()` made before is used.  Making one is a collective of all ranks.
    """

    def __init__(self, module: Any, num_stages: int, tensor_ranks: int) -> None:
        self._owner: Any = module if hasattr(module, "_grid") else SimpleNamespace(_grid=None)
        found = self._owner._grid
        if found is None or found.slice_parallel_size != tensor_ranks:
            replicas = get_world_size() // (num_stages * tensor_ranks)
            found = PipelineParallelGrid(
                PipeDataParallelTopology(num_stages, replicas)
                if tensor_ranks == 1
                else PipeModelDataParallelTopology(num_stages, tensor_ranks, replicas)
            )
        self.grid: PipelineParallelGrid = found
        self._owner._grid = found

    def close(self) -> None:
        """Destroy the groups."""
        self._owner._grid = None
        self.grid.close()


def _squarish(world_size: int) -> ProcessTopology:
    """Return stages and replicas that share the prime factors of the world size in turns."""
    sizes = [1, 1]
    for index, prime in enumerate(_prime_factors(world_size)):
        sizes[index % 2] *= prime
    return PipeDataParallelTopology(num_pp=sizes[0], num_dp=sizes[1])
