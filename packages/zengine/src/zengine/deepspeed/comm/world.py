"""`deepspeed.comm`: process groups, ranks and sizes."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

import zcomm
from zengine.deepspeed.comm.discovery import discover_ranks
from zengine.deepspeed.constants import default_pg_timeout

__all__ = [
    "destroy_process_group",
    "get_all_ranks_from_group",
    "get_global_rank",
    "get_local_rank",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "has_all_gather_into_tensor",
    "has_all_reduce_coalesced",
    "has_coalescing_manager",
    "has_reduce_scatter_tensor",
    "init_distributed",
    "initialize_mesh_device",
    "is_available",
    "is_initialized",
    "new_group",
]

log = logging.getLogger("zengine")


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int | None = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Create the default process group; does nothing if there is one.

    dist_backend: "nccl" (without a GPU: "gloo", with a notice, since many scripts write "nccl"), "gloo", or None for
        the device's; others are passed to torch.distributed.
    timeout: of the rendezvous and of each collective; default DEEPSPEED_TIMEOUT minutes, or 10.
    init_method, rank, world_size: passed to torch.distributed; default: the environment (torchrun, SLURM, MPI).
    auto_mpi_discovery: if RANK is missing, write the ranks of MPI, SLURM, AzureML or SageMaker to the environment
        (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).  They are read either way.
    verbose: log them.  config: ignored.

    Raises zcomm.RendezvousFailed if ranks are missing; ValueError if dist_init_required is False and there is no
        default process group, or for a launcher's variable that is missing or contradicts another.
    """
    if is_initialized():
        return
    if dist_init_required is False:
        raise ValueError(
            "init_distributed(dist_init_required=False): torch.distributed has no default process group. Create "
            "one first, or omit dist_init_required."
        )
    if auto_mpi_discovery:
        discover_ranks(distributed_port, verbose=verbose)
    if dist_backend == "nccl" and not torch.cuda.is_available():
        log.warning("init_distributed(dist_backend='nccl'): no GPU is visible, so the backend is 'gloo'")
        dist_backend = "gloo"
    if init_method is not None or dist_backend not in (None, "nccl", "gloo"):
        dist.init_process_group(
            dist_backend,
            init_method=init_method,
            rank=rank,
            world_size=world_size,
            timeout=default_pg_timeout if timeout is None else timeout,
        )
        return
    environ = dict(os.environ)
    if distributed_port is not None:
        environ.setdefault("MASTER_PORT", str(distributed_port))
    if rank >= 0 and world_size > 0:
        environ.update({"RANK": str(rank), "WORLD_SIZE": str(world_size)})
    zcomm.init(backend=dist_backend, timeout_s=None if timeout is None else timeout.total_seconds(), environ=environ)


def is_available() -> bool:
    """Return True if torch was built with torch.distributed."""
    return bool(dist.is_available())


def is_initialized() -> bool:
    """Return True if there is a default process group."""
    return is_available() and bool(dist.is_initialized())


def destroy_process_group(group: ProcessGroup | None = None) -> None:
    """Destroy `group`, by default the default process group."""
    dist.destroy_process_group(group)


def get_rank(group: ProcessGroup | None = None) -> int:
    """Return this process's rank in `group`; 0 without a process group."""
    return int(dist.get_rank(group)) if is_initialized() else 0


def get_world_size(group: ProcessGroup | None = None) -> int:
    """Return the number of ranks in `group`; 1 without a process group."""
    return int(dist.get_world_size(group)) if is_initialized() else 1


def get_local_rank() -> int:
    """Return this process's rank within its host."""
    return zcomm.detect().local_rank


def get_global_rank(group: ProcessGroup | None = None, group_rank: int = 0) -> int:
    """Return the global rank of `group_rank` in `group`."""
    return group_rank if group is None else int(dist.get_global_rank(group, group_rank))


def get_all_ranks_from_group(group: ProcessGroup | None = None) -> list[int]:
    """Return the global ranks of `group`, in its order."""
    return [get_global_rank(group, index) for index in range(get_world_size(group))]


def get_world_group() -> Any:
    """Return the group of all ranks."""
    return dist.group.WORLD


def new_group(ranks: Sequence[int] | None = None, **options: Any) -> Any:
    """Create a group of `ranks`; every rank of the world must call."""
    return dist.new_group(None if ranks is None else list(ranks), **options)


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> DeviceMesh:
    """Create a DeviceMesh over all ranks; every rank must call."""
    init_distributed()
    kind = "cuda" if "nccl" in str(dist.get_backend()) else "cpu"
    return zcomm.make_mesh(kind, **dict(zip(mesh_dim_names, mesh_shape, strict=True)))


def has_all_gather_into_tensor() -> bool:
    """Return True: every supported torch has it."""
    return True


def has_reduce_scatter_tensor() -> bool:
    """Return True."""
    return True


def has_all_reduce_coalesced() -> bool:
    """Return True; see `all_reduce_coalesced`."""
    return True


def has_coalescing_manager() -> bool:
    """Return False: coalesced collectives send one flat tensor instead."""
    return False
