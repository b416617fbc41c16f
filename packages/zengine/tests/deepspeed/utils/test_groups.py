"""Which ranks do what together, where ZeRO alone splits the model."""

from __future__ import annotations

import pytest

from zcomm.testing import run_ranks
from zengine.deepspeed import NotAvailable
from zengine.deepspeed.utils import groups


def check_two() -> tuple[int, ...]:
    return (
        groups._get_data_parallel_rank(),
        groups._get_data_parallel_world_size(),
        groups.get_data_parallel_group().size(),
        groups._get_sequence_parallel_world_size(),
        groups._get_model_parallel_rank(),
    )


def test_all_ranks_are_replicas():
    assert run_ranks(check_two, 2) == [(0, 2, 2, 1, 0), (1, 2, 2, 1, 0)]


def check_mpu() -> tuple[int, int]:
    import torch.distributed as dist

    mine = [dist.new_group([0]), dist.new_group([1])][dist.get_rank()]
    mpu = type("Mpu", (), {"get_data_parallel_group": staticmethod(lambda: mine)})
    groups.initialize(mpu=mpu)
    try:
        return groups.get_data_parallel_world_size(), groups.get_data_parallel_rank()
    finally:
        groups.initialize()


def test_an_mpu_names_other_replicas():
    assert run_ranks(check_mpu, 2) == [(1, 0), (1, 0)]


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (groups._get_sequence_parallel_group, "sequence parallelism"),
        (groups._get_model_parallel_group, "tensor parallelism"),
        (groups._get_expert_parallel_group, "expert parallelism"),
        (lambda: groups.initialize(ep_size=2), "expert parallelism"),
    ],
)
def test_groups_that_do_not_exist_are_refused_rather_than_mistaken_for_all_ranks(ask, told):
    with pytest.raises(NotAvailable, match=told):
        ask()
