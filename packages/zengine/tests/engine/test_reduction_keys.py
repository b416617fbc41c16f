"""Keys that decide how gradients travel, against sums that plain torch computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zcomm
import zpartition
from zcomm.testing import run_ranks
from zengine.testing import Regression, small_engine

STAGES = (0, 1, 2, 3)
MOMENTS = [("boundary", 0), ("boundary", 1), *(("micro_step", stage) for stage in STAGES)]  # reduce_at, stage


def batch_of(rank: int, index: int) -> torch.Tensor:
    return torch.linspace(-1, 1 + index + 2 * rank, 6).view(2, 3)


def trained(stage: int, operation: str, **zero: Any) -> dict[str, torch.Tensor]:
    engine = small_engine(
        gradient_allreduce_op=operation,
        gradient_accumulation_steps=2,
        zero_optimization={"stage": stage, **zero},
    )
    if "reduce_bucket_size" in zero:  # 0: a bucket holds one parameter
        assert len(engine.parts.partition.layout.buckets) == len(list(engine.module.parameters()))
    for index in range(2):
        engine.backward(engine(batch_of(zcomm.group_rank(), index)))
        engine.step()
    return zpartition.whole_state_dict(engine.module)


def sums_of_plain_torch(moment: str) -> dict[str, torch.Tensor]:
    """The weights after one step of SGD whose gradient is summed over two ranks.

    After each micro-step (a0 + b0) + (a1 + b1), at the boundary (a0 + a1) + (b0 + b1).
    """
    model = Regression()
    total = {name: torch.zeros_like(param) for name, param in model.named_parameters()}
    pairs = [[(0, index), (1, index)] for index in range(2)]
    for pair in pairs if moment == "micro_step" else zip(*pairs):
        found = []
        for rank, index in pair:
            model.zero_grad()
            (model(batch_of(rank, index)) / 2).backward()
            found.append({name: param.grad.clone() for name, param in model.named_parameters()})
        for name in total:
            total[name] += found[0][name] + found[1][name]
    return {name: param.detach() - 0.1 * total[name] for name, param in model.named_parameters()}


@pytest.mark.parametrize(("moment", "stage"), MOMENTS)
def test_gradients_are_summed_over_replicas_and_averaged_over_micro_steps(moment: str, stage: int) -> None:
    expected = sums_of_plain_torch(moment)
    for weights in run_ranks(trained, 2, stage, "SUM", **({"reduce_at": moment} if stage < 2 else {})):
        assert {name: torch.equal(weights[name], expected[name]) for name in expected} == dict.fromkeys(
            expected, True
        )


@pytest.mark.parametrize("stage", STAGES)
def test_a_bucket_size_of_zero_reduces_each_parameter_by_itself(stage: int) -> None:
    expected = sums_of_plain_torch("boundary" if stage < 2 else "micro_step")  # the defaults
    for weights in run_ranks(trained, 2, stage, "sum", reduce_bucket_size=0, contiguous_gradients=False):
        assert {name: torch.equal(weights[name], expected[name]) for name in expected} == dict.fromkeys(
            expected, True
        )


def fp32_masters(stage: int, key: str) -> torch.Tensor:
    """The masters after one step of rate 1 from zero whose gradients are 1 and 1 + 2**-7, which bf16 cannot add."""
    model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    engine = small_engine(
        model,
        bf16={"enabled": True},
        optimizer={"type": "SGD", "params": {"lr": 1.0}},
        zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 0},
        **({key: True} if key else {}),
    )
    x = torch.full((1, 4), 1 + 2**-7 * zcomm.group_rank(), dtype=torch.bfloat16)
    engine.backward(engine(x).sum())
    engine.step()
    master = zpartition.safe_get_full_fp32_param(engine.module.weight)
    assert master is not None
    return master


@pytest.mark.parametrize("stage", STAGES)
def test_fp32_allreduce_sends_gradients_in_fp32(stage: int) -> None:
    for exact, rounded in zip(
        run_ranks(fp32_masters, 2, stage, "fp32_allreduce"), run_ranks(fp32_masters, 2, stage, "")
    ):
        assert exact.unique().tolist() == [-(1 + 2**-8)]
        assert rounded.unique().tolist() == [-1.0]
