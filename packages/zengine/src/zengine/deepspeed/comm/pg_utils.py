"""`deepspeed.comm.pg_utils`: questions about a group that may be absent."""

from __future__ import annotations

from torch.distributed import ProcessGroup

from zengine.deepspeed.comm.world import get_world_size

__all__ = ["is_parallel"]


def is_parallel(group: ProcessGroup | None) -> bool:
    """Return True if `group` has more than one rank; None means no group here, not the world."""
    return group is not None and get_world_size(group) > 1
