"""Which ranks do what together: of the newest engine, an mpu, or the world."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import zcomm
import zengine.deepspeed as deepspeed
from zcomm.testing import run_ranks
from zengine.deepspeed.utils import groups
from zpartition.testing.tensor_models import PLAN, Language

CONFIG = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def check_two() -> tuple[int, ...]:
    return (
        groups._get_data_parallel_rank(),
        groups._get_data_parallel_world_size(),
        groups.get_data_parallel_group().size(),
        groups._get_sequence_parallel_world_size(),
        groups._get_model_parallel_rank(),
        groups._get_model_parallel_group().size(),
        groups._get_sequence_parallel_group().size(),
        groups._get_sequence_data_parallel_world_size(),
    )


def test_all_ranks_are_replicas():
    assert run_ranks(check_two, 2) == [(0, 2, 2, 1, 0, 1, 1, 2), (1, 2, 2, 1, 0, 1, 1, 2)]


def check_mpu() -> tuple[int, ...]:
    mine = [dist.new_group([0]), dist.new_group([1])][dist.get_rank()]
    mpu = type("Mpu", (), {"get_data_parallel_group": staticmethod(lambda: mine)})
    groups.initialize(mpu=mpu)
    try:
        return (
            groups.get_data_parallel_world_size(),
            groups.get_data_parallel_rank(),
            groups.get_model_parallel_world_size(),
            groups._get_model_parallel_group().size(),
            groups._get_sequence_data_parallel_rank(),
        )
    finally:
        groups.initialize()


def test_an_mpu_names_other_replicas():
    assert run_ranks(check_mpu, 2) == [(1, 0, 1, 1, 0), (1, 0, 1, 1, 0)]


def told() -> tuple[Any, ...]:
    return (
        groups.get_tensor_model_parallel_world_size(),
        dist.get_process_group_ranks(groups.get_tensor_model_parallel_group()),
        groups.get_tensor_model_parallel_src_rank(),
        dist.get_process_group_ranks(groups.get_data_parallel_group()),
        groups._get_sequence_data_parallel_rank(),
    )


def check_engines() -> list[tuple[Any, ...]]:
    split = deepspeed.tp_model_init(Language(), 2, None, config=PLAN)
    one = deepspeed.initialize(model=split, config=CONFIG)[0]
    found = [told()]
    other = deepspeed.initialize(model=Language(), config=CONFIG)[0]
    found.append(told())
    groups.use(one)
    found.append(told())
    one.close()
    del one, split
    other.close()
    return found


def test_an_engine_tells_of_its_own():
    for rank, (split, whole, again) in enumerate(run_ranks(check_engines, 4)):
        tensor, data = [[0, 1], [2, 3]][rank // 2], [[0, 2], [1, 3]][rank % 2]
        assert split == again == (2, tensor, tensor[0], data, rank // 2)
        assert whole == (1, [rank], rank, [0, 1, 2, 3], rank)


def check_experts() -> list[Any]:
    def told() -> list[Any]:
        return [
            groups._get_expert_parallel_world_size("ep_size_2"),
            groups._get_expert_parallel_rank(),
            dist.get_process_group_ranks(groups._get_expert_parallel_group("ep_size_2")),
            groups._get_expert_data_parallel_world_size(),
            groups._get_expert_data_parallel_rank(),
            dist.get_process_group_ranks(groups._get_expert_data_parallel_group()),
        ]

    with pytest.raises(ValueError, match=r"expert=3 must divide the 4 ranks .* Choose one of 1, 2, 4"):
        groups.initialize(ep_size=3)
    with pytest.raises(ValueError, match="shards experts over consecutive ranks"):
        groups._create_expert_and_data_parallel(2, use_data_before_expert_parallel_=True)
    groups._create_expert_and_data_parallel(2)
    found = [told()]
    groups.initialize()
    layer = deepspeed.moe.layer.MoE(4, torch.nn.Linear(4, 4), num_experts=2, ep_size=2)
    engine = deepspeed.initialize(model=torch.nn.Sequential(layer), config=CONFIG)[0]
    found.append(told())
    found.append(len(layer.experts.own))
    engine.close()
    return found


def test_expert_groups_are_those_announced_and_then_an_engines():
    for rank, (announced, own, num_experts) in enumerate(run_ranks(check_experts, 4)):
        first = rank // 2 * 2
        assert announced == own == [2, rank % 2, [first, first + 1], 2, rank // 2, [rank % 2, rank % 2 + 2]]
        assert num_experts == 1


def check_set() -> list[Any]:
    ranks = dist.get_process_group_ranks
    tensor = [ranks(group) for group in groups._init_tp_mesh_device(2) or ()]
    assert groups._init_tp_mesh_device(2) is None  # set already
    groups.set_tensor_model_parallel_rank(7)
    found = [tensor, ranks(groups.get_tensor_model_parallel_group()), groups.get_tensor_model_parallel_rank()]
    groups._release_process_group_references()
    with pytest.raises(AssertionError, match="must equal world_size"):
        groups._init_tp_mesh_device(2, 3)
    found.append(groups.get_tensor_model_parallel_rank())
    mpu = zcomm.Groups.of(zcomm.Degrees(tensor=2))
    groups._create_expert_data_and_model_parallel(2, mpu=type("Mpu", (), _getters(mpu)))
    found += [ranks(groups._get_expert_parallel_group_dict()["ep_size_2"]), groups._get_expert_parallel_rank()]
    found.append(ranks(groups._get_expert_data_parallel_group_dict()["ep_size_2"]))
    groups._release_process_group_references()
    found.append(groups._zero_param_parallel_is_initialized())
    groups._create_zero_param_parallel_group(2)
    found.append(groups._get_zero_param_intra_parallel_group_ranks())
    with pytest.raises(AssertionError, match="already initialized"):
        groups._create_zero_param_parallel_group(2)
    groups._release_process_group_references()
    return found


def _getters(mpu: zcomm.Groups) -> dict[str, Any]:
    names = ("get_data_parallel_group", "get_model_parallel_group")
    return {name: staticmethod(getattr(mpu, name)) for name in names}


def test_groups_that_are_set_before_an_engine():
    for rank, found in enumerate(run_ranks(check_set, 4)):
        pair, stride = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        assert found == [[stride, pair], pair, 7, 0, stride, rank // 2, [rank], False, pair]


def check_second_copies() -> tuple[list[int], int]:
    zero = {"stage": 3, "zero_hpz_partition_size": 2}
    engine = deepspeed.initialize(model=torch.nn.Linear(4, 4), config={**CONFIG, "zero_optimization": zero})[0]
    found = groups._get_zero_param_intra_parallel_group_ranks()
    engine.close()
    return found, groups._get_zero_param_intra_parallel_rank_in_mygroup()


def test_ranks_with_second_copies_of_weights():
    for rank, found in enumerate(run_ranks(check_second_copies, 4)):
        assert found == ([rank // 2 * 2, rank // 2 * 2 + 1], rank % 2)


def test_alone_there_is_one_rank_of_everything():
    sizes = groups.get_data_parallel_world_size, groups.get_model_parallel_world_size
    assert [size() for size in sizes] == [zcomm.group_size(), 1]
