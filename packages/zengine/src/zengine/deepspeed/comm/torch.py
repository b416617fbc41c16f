"""`deepspeed.comm.torch.TorchBackend`: the collectives as methods of an object."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, final

import torch.distributed as dist
from torch.distributed import ProcessGroup

from zengine.deepspeed.comm import verbs, world
from zengine.deepspeed.comm.backend import Backend
from zengine.deepspeed.comm.verbs import all_gather_object, broadcast_object_list

__all__ = ["TorchBackend"]


@final
class TorchBackend(Backend):
    """torch.distributed's world, created if there is none.  Its methods are the functions of `deepspeed.comm`.

    backend: "nccl", "gloo", ...; None: the device's.  timeout, init_method, rank, world_size: as in
    `init_distributed`.  name: of the object.
    """

    def __init__(
        self,
        backend: str | None = None,
        timeout: timedelta | None = None,
        init_method: str | None = None,
        rank: int = -1,
        world_size: int = -1,
        name: str = "torch",
    ) -> None:
        world.init_distributed(backend, timeout=timeout, init_method=init_method, rank=rank, world_size=world_size)
        super().__init__(name, world.get_rank(), world.get_world_size())
        self.world_group = world.get_world_group()
        self.process_groups.append(self.world_group)
        self.init_process_group()

    all_reduce = staticmethod(verbs.all_reduce)
    inference_all_reduce = staticmethod(verbs.inference_all_reduce)
    all_reduce_coalesced = staticmethod(verbs.all_reduce_coalesced)
    reduce = staticmethod(verbs.reduce)
    reduce_scatter = staticmethod(verbs.reduce_scatter)
    reduce_scatter_tensor = staticmethod(verbs.reduce_scatter_tensor)
    all_gather = staticmethod(verbs.all_gather)
    all_gather_base = staticmethod(verbs.all_gather_base)
    all_gather_coalesced = staticmethod(verbs.all_gather_coalesced)
    all_gather_into_tensor = staticmethod(verbs.all_gather_into_tensor)
    all_gather_object = staticmethod(all_gather_object)
    all_to_all = staticmethod(verbs.all_to_all)
    all_to_all_single = staticmethod(verbs.all_to_all_single)
    broadcast = staticmethod(verbs.broadcast)
    broadcast_object_list = staticmethod(broadcast_object_list)
    send = staticmethod(verbs.send)
    recv = staticmethod(verbs.recv)
    isend = staticmethod(verbs.isend)
    irecv = staticmethod(verbs.irecv)
    batch_isend_irecv = staticmethod(verbs.batch_isend_irecv)
    gather = staticmethod(verbs.gather)
    scatter = staticmethod(verbs.scatter)
    barrier = staticmethod(verbs.barrier)
    monitored_barrier = staticmethod(verbs.monitored_barrier)
    get_rank = staticmethod(world.get_rank)
    get_world_size = staticmethod(world.get_world_size)
    get_world_group = staticmethod(world.get_world_group)
    get_global_rank = staticmethod(world.get_global_rank)
    has_all_gather_into_tensor = staticmethod(world.has_all_gather_into_tensor)
    has_reduce_scatter_tensor = staticmethod(world.has_reduce_scatter_tensor)

    def get_all_gather_function(self) -> Any:
        """Return `all_gather_into_tensor`."""
        return verbs.all_gather_into_tensor

    def get_reduce_scatter_function(self) -> Any:
        """Return `reduce_scatter_tensor`."""
        return verbs.reduce_scatter_tensor

    def is_initialized(self) -> bool:
        return world.is_initialized()

    def get_backend(self, group: ProcessGroup | None = None) -> str:
        """Return the name of torch's back end of a group."""
        return str(dist.get_backend(group))

    def new_group(self, ranks: Sequence[int] | None = None) -> Any:
        return world.new_group(ranks)

    def destroy_process_group(self, group: ProcessGroup | None = None) -> None:
        world.destroy_process_group(group)

    def init_device_mesh(self, mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> Any:
        """Return `initialize_mesh_device`'s mesh."""
        return world.initialize_mesh_device(mesh_shape, mesh_dim_names)
