"""An mpu with sequence ranks, made and asked by DeepSpeed's names."""

from __future__ import annotations

import pytest

import zcomm
from zcomm.testing import run_ranks
from zengine.deepspeed.runtime.sequence_parallel import parallel_state_sp as state


def _made() -> list[int]:
    with pytest.raises(RuntimeError, match="call initialize_sequence_parallel"):
        state.get_sequence_parallel_group()
    with pytest.raises(ValueError, match="3"):
        state.initialize_sequence_parallel(3)
    groups = state.initialize_sequence_parallel(2)
    assert groups.get_sequence_parallel_group() is state.get_sequence_parallel_group()
    found = [
        state.get_sequence_parallel_rank(),
        state.get_sequence_parallel_world_size(),
        state.get_sequence_data_parallel_rank(),
        state.get_sequence_data_parallel_world_size(),
        zcomm.group_size(state.get_sequence_data_parallel_group()),
        state.get_data_parallel_world_size(),  # the module is an mpu: its other getters are those of the groups
    ]
    with pytest.raises(AttributeError, match="size"):
        _ = state.size
    state._made.clear()
    return found


def test_neighbours_share_a_sequence() -> None:
    assert run_ranks(_made, 4) == [[rank % 2, 2, rank, 4, 4, 2] for rank in range(4)]
