"""`deepspeed.runtime.sequence_parallel.parallel_state_sp`: an `mpu` with sequence ranks.

What was made last is kept here for those who ask this module; an engine is given its groups (`initialize(mpu=...)`).
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

_made: list[zcomm.Groups] = []  # the last, if any


def initialize_sequence_parallel(sequence_parallel_size: int) -> zcomm.Groups:
    """Lay out all ranks, runs of `sequence_parallel_size` neighbours as sequence ranks; returns the groups, an `mpu`.

    Raises ValueError if it does not divide the ranks.
    """
    init_distributed()
    _made[:] = [zcomm.Groups.of(zcomm.Degrees(sequence=sequence_parallel_size))]
    return _made[0]


def _groups() -> zcomm.Groups:
    if not _made:
        raise RuntimeError("there are no sequence ranks yet: call initialize_sequence_parallel(size) first")
    return _made[0]


def get_sequence_parallel_group() -> Any:
    """The ranks that share samples."""
    return _groups().sequence()


def get_sequence_parallel_world_size() -> int:
    """How many they are."""
    return len(_groups().ranks("sequence"))


def get_sequence_parallel_rank() -> int:
    """Return which of them this is."""
    return _groups().ranks("sequence").index(_groups().rank)


def get_sequence_data_parallel_group() -> Any:
    """The ranks that sum gradients."""
    return _groups().gradient()


def get_sequence_data_parallel_world_size() -> int:
    """How many they are."""
    return zcomm.group_size(_groups().gradient())


def get_sequence_data_parallel_rank() -> int:
    """Return which of them this is."""
    return zcomm.group_rank(_groups().gradient())
