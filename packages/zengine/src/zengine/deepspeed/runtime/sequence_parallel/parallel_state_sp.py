"""`deepspeed.runtime.sequence_parallel.parallel_state_sp`: an `mpu` with sequence ranks.

The getters return the groups created last; pass them to an engine as `initialize(mpu=...)`.
"""

from __future__ import annotations

from typing import Any

import zcomm
from zengine.deepspeed.comm.world import init_distributed

__all__ = [
    "get_sequence_data_parallel_group",
    "get_sequence_data_parallel_rank",
    "get_sequence_data_parallel_world_size",
    "get_sequence_parallel_group",
    "get_sequence_parallel_rank",
    "get_sequence_parallel_world_size",
    "initialize_sequence_parallel",
]

_made: list[zcomm.Groups] = []  # the groups created last, if any


def initialize_sequence_parallel(sequence_parallel_size: int) -> zcomm.Groups:
    """Create groups of `sequence_parallel_size` consecutive ranks; return them as an `mpu`.

    Raises ValueError if the size does not divide the world size.
    """
    init_distributed()
    _made[:] = [zcomm.Groups.of(zcomm.Degrees(sequence=sequence_parallel_size))]
    return _made[0]


def __getattr__(name: str) -> Any:
    """Return another getter of an `mpu` (`get_data_parallel_group`, ...), of the groups created last."""
    if not name.startswith("get_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_groups(), name)


def _groups() -> zcomm.Groups:
    if not _made:
        raise RuntimeError("sequence parallelism is not initialized: call initialize_sequence_parallel(size) first")
    return _made[0]


def get_sequence_parallel_group() -> Any:
    """Return the group of the ranks that share samples."""
    return _groups().sequence()


def get_sequence_parallel_world_size() -> int:
    """Return the size of that group."""
    return len(_groups().ranks("sequence"))


def get_sequence_parallel_rank() -> int:
    """Return this rank's index in that group."""
    return _groups().ranks("sequence").index(_groups().rank)


def get_sequence_data_parallel_group() -> Any:
    """Return the group of the ranks that sum gradients."""
    return _groups().gradient()


def get_sequence_data_parallel_world_size() -> int:
    """Return the size of that group."""
    return zcomm.group_size(_groups().gradient())


def get_sequence_data_parallel_rank() -> int:
    """Return this rank's index in that group."""
    return zcomm.group_rank(_groups().gradient())
