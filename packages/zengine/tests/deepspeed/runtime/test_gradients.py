"""Norms, clipping and overflow checks; numbers without a comment are those of DeepSpeed 0.19.8."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import Parameter

from zcomm.testing import run_ranks
from zengine.deepspeed.runtime import utils
from zengine.deepspeed.utils import groups

TENSORS = (torch.tensor([3.0, 4.0]), torch.tensor([12.0]))


def with_grads(*grads: torch.Tensor) -> list[Parameter]:
    params = [Parameter(torch.zeros_like(grad)) for grad in grads]
    for param, grad in zip(params, grads):
        param.grad = grad.clone()
    return params


def test_norms_of_this_rank():
    assert (utils.get_global_norm([3.0, 4.0]), utils.get_global_norm([1.0, -1.0])) == (5.0, math.inf)
    assert float(utils.combine_grad_norm_groups([3.0, 4.0])) == 5.0
    assert float(utils.combine_grad_norm_groups([1.0, -1.0])) == math.inf
    assert (utils.get_weight_norm(TENSORS), utils.get_weight_norm(TENSORS, math.inf)) == (13.0, 12.0)
    assert utils.get_weight_norm(TENSORS, 3) == pytest.approx(12.2070549)
    assert utils.get_weight_norm([torch.tensor([math.inf])]) == -1
    assert float(utils.get_global_norm_of_tensors(TENSORS)) == 13.0
    assert float(utils.get_global_norm_of_tensors([torch.tensor([math.nan])])) == -1
    params = with_grads(*TENSORS)
    masks = [torch.tensor([[0, 1]]), torch.zeros(0, 2, dtype=torch.long)]
    assert (utils.get_flattened_grad_norm(params), utils.get_grad_norm(params)) == (13.0, 13.0)
    assert utils.get_flattened_grad_norm(params, grad_norm_mask=masks) == pytest.approx(12.6491106)
    assert utils.get_grad_zeros(with_grads(torch.tensor([0.0, 1.0, 0.0]))) == 2.0
    assert utils.get_norm_with_moe_layers(3.0, None, {}) == 3.0


def test_tensors_are_clipped_by_their_norm():
    clipped = [tensor.clone() for tensor in TENSORS]
    assert float(utils.clip_tensors_by_global_norm(clipped, 1.0)) == 13.0
    torch.testing.assert_close(clipped, [tensor / 13 for tensor in TENSORS], atol=1e-6, rtol=1e-6)
    utils.clip_tensors_by_global_norm(clipped, 5.0)  # smaller: unchanged
    torch.testing.assert_close(clipped, [tensor / 13 for tensor in TENSORS], atol=1e-6, rtol=1e-6)


def test_non_finite_values_are_found():
    for value, expected in ((1.0, False), (math.nan, True), (math.inf, True), (-math.inf, True)):
        assert bool(utils.has_inf_or_nan(torch.tensor([1.0, value]))) is expected
    assert not utils.has_inf_or_nan(torch.zeros(0))
    assert utils.has_inf_or_nan(torch.sparse_coo_tensor(torch.tensor([[1]]), torch.tensor([math.inf]), (3,)))
    assert utils.is_invalid_grad_norm(-1.0)


def check_two() -> dict[str, Any]:
    """As DeepSpeed's tests of these functions: an expert's gradient differs between the ranks."""
    rank = dist.get_rank()
    groups._create_expert_and_data_parallel(2)
    try:
        params = with_grads(torch.tensor([1.0]), torch.tensor([rank + 1.0]))
        params[1].allreduce = False  # type: ignore[attr-defined]
        norm = float(utils.clip_grad_norm_(params, max_norm=0.1))
        bad = with_grads(torch.tensor([1.0]), torch.tensor([math.inf if rank else 1.0]))
        bad[1].allreduce = False  # type: ignore[attr-defined]
        flat = torch.cat([param.grad for param in bad if param.grad is not None])
        checker = utils.CheckOverflow([bad])
        return {
            "norm": norm,
            "clipped": [param.grad.item() for param in params if param.grad is not None],
            "overflow": checker.check(),
            "serial": checker.has_overflow_serial(bad),
            "by norm": checker.check_using_norm([utils.get_weight_norm([flat])], reduce_overflow=False),
            "fine": utils.CheckOverflow().check([params]),
        }
    finally:
        groups.initialize()


def test_ranks_agree_on_the_norm_and_on_an_overflow():
    first, second = run_ranks(check_two, 2)
    mean = (math.sqrt(2) + math.sqrt(5)) / 2
    assert first["norm"] == second["norm"] == pytest.approx(mean)
    assert second["clipped"] == pytest.approx([0.1 / mean, 0.2 / mean], rel=1e-5)
    assert (first["overflow"], first["by norm"], first["serial"], first["fine"]) == (True, True, False, False)


def check_mpu() -> tuple[float, float]:
    everyone, alone = dist.group.WORLD, [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    mpu = type(
        "Mpu",
        (),
        {
            "get_model_parallel_group": staticmethod(lambda: everyone),
            "get_model_parallel_rank": staticmethod(dist.get_rank),
            "get_data_parallel_group": staticmethod(lambda: alone),
        },
    )
    split, whole = with_grads(torch.tensor([3.0, 4.0]), torch.tensor([1.0]))
    split.model_parallel = True  # type: ignore[attr-defined]
    return utils.get_grad_norm([split, whole], mpu=mpu), utils.get_weight_norm([torch.ones(1)], mpu=mpu)


def check_experts_of_a_pipeline() -> list[float]:
    everyone, alone = dist.group.WORLD, [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    stages = {
        "get_pipe_parallel_group": staticmethod(lambda: everyone),
        "get_pipe_parallel_world_size": staticmethod(lambda: 2),
    }
    tensors = [torch.tensor([3.0 + dist.get_rank()])]  # norms of two stages: 3 and 4
    found = [utils.get_global_norm_of_tensors(tensors, moe_ep_group=alone)]
    found += [utils.get_global_norm_of_tensors(tensors, mpu=type("Mpu", (), stages), moe_ep_group=alone)]
    return [float(each) for each in found]


def test_norms_of_experts_are_summed_over_the_stages_of_a_pipeline():
    assert run_ranks(check_experts_of_a_pipeline, 2) == [[3, 5], [4, 5]]


def test_a_copy_counts_on_one_model_parallel_rank():
    assert run_ranks(check_mpu, 2) == [(pytest.approx(math.sqrt(51)), 1.0)] * 2
