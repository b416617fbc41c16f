"""Process groups of a grid, and messages between its stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import zengine.deepspeed as deepspeed
from zcomm.testing import RankFailed, run_ranks
from zengine.deepspeed.runtime.pipe import p2p
from zengine.deepspeed.runtime.pipe.topology import (
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
    _prime_factors,
)


def summed(group: Any) -> int:
    value = torch.tensor([dist.get_rank()])
    dist.all_reduce(value, group=group)
    return int(value)


def check_pipe_and_data() -> dict[str, Any]:
    grid = PipelineParallelGrid(ProcessTopology(axes=["pipe", "data"], dims=[2, 2]))
    found = {
        "pipe": summed(grid.get_pipe_parallel_group()) == sum(grid.pp_group),
        "data": summed(grid.get_data_parallel_group()) == sum(grid.dp_group),
        "all": summed(grid.get_model_parallel_group()) == sum(grid.pp_group),
        "alone": summed(grid.get_slice_parallel_group()),
        "first": grid.is_first_stage == (grid.get_stage_id() == 0),
        "last": grid.is_last_stage,
        "global": [grid.stage_to_global(stage_id=stage, data=data) for stage in (0, 1) for data in (0, 1)],
        "own": [grid.stage_to_global(stage_id=stage) for stage in (0, 1)],
        "p2p": grid.p2p_groups,
    }
    p2p.init_process_groups(grid)
    if grid.is_first_stage:
        p2p.send(torch.tensor([7.0]), dest_stage=1)
        p2p.send_obj({"shape": [2, 3]}, grid.stage_to_global(1))
    else:
        received = torch.zeros(1)
        p2p.recv(received, src_stage=0)
        found["received"] = (float(received), p2p.recv_obj(grid.stage_to_global(0)))
        p2p.wait()
    return found


def test_a_grid_of_stages_and_replicas():
    ranks = run_ranks(check_pipe_and_data, 4)
    for rank, found in enumerate(ranks):
        assert all(found[name] for name in ("pipe", "data", "all", "first"))
        assert (found["alone"], found["last"]) == (rank, rank >= 2)
        assert found["global"] == [0, 1, 2, 3]
        assert found["own"] == [rank % 2, 2 + rank % 2]
        assert found["p2p"] == [[0, 2], [1, 3], [2, 0], [3, 1]]
    assert ranks[3]["received"] == (7.0, {"shape": [2, 3]})


def check_model() -> tuple[int, ...]:
    grid = PipelineParallelGrid(PipeModelDataParallelTopology(num_pp=1, num_mp=2, num_dp=1))
    return (
        grid.get_tensor_model_parallel_rank(),
        grid.get_slice_parallel_world_size(),
        summed(grid.get_tensor_model_parallel_group()),
        grid.get_model_parallel_world_size(),
        grid.get_data_parallel_world_size(),
    )


def check_wrong() -> None:
    PipelineParallelGrid(ProcessTopology(axes=["pipe", "data"], dims=[3, 1]))


def test_layers_that_are_split_and_sizes_that_do_not_fit():
    assert run_ranks(check_model, 2) == [(0, 2, 1, 2, 1), (1, 2, 1, 2, 1)]
    with pytest.raises(RankFailed, match="has 3 ranks and the world 2"):
        run_ranks(check_wrong, 2)


def check_engine() -> tuple[Any, ...]:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    model = deepspeed.PipelineModule([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)], num_stages=2)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    grid: Any = engine.grid
    found = grid.get_stage_id(), grid.get_data_parallel_world_size(), grid.pp_group, len(grid._made)
    dist.barrier()  # a rank that is ahead would close connections that the other is still making
    engine.destroy()
    return *found, len(grid._made)


def test_an_engine_of_stages_has_a_grid():
    assert run_ranks(check_engine, 2) == [(0, 1, [0, 1], 4, 0), (1, 1, [0, 1], 4, 0)]


def test_primes():
    assert [_prime_factors(number) for number in (1, 12, 29)] == [[], [2, 2, 3], [29]]
    with pytest.raises(ValueError, match="at least 1"):
        _prime_factors(0)
