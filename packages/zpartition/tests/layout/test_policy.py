"""Policies: factors of averaging, and rejected combinations."""

from __future__ import annotations

import pytest
import torch

from zpartition import Averaging, ReduceAt, ZeroPolicy


@pytest.mark.parametrize(
    ("averaging", "world_size", "factors"),
    [
        (Averaging(), 4, (1.0, 0.25)),
        (Averaging(prescale=True), 4, (0.25, 1.0)),
        (Averaging(predivide=2.0), 4, (0.5, 0.5)),
        (Averaging(operation="sum"), 4, (1.0, 1.0)),
        (Averaging(), 1, (1.0, 1.0)),
        (Averaging(prescale=True), 1, (1.0, 1.0)),
    ],
)
def test_the_mean_is_split_over_the_two_sides_of_the_wire(averaging, world_size, factors):
    assert averaging.factors(world_size) == factors


def test_stage_2_rejects_a_full_local_gradient():
    with pytest.raises(ValueError, match="Use stage=1 for one reduction per step"):
        ZeroPolicy(stage=2, reduce_at=ReduceAt.BOUNDARY)


def test_a_sum_rejects_division():
    with pytest.raises(ValueError, match="does not divide"):
        ZeroPolicy(averaging=Averaging(operation="sum", predivide=2.0))


def test_float16_masters_reject_sums_that_their_gradients_cannot_hold():
    with pytest.raises(ValueError, match="a finite sum may overflow in float16"):
        ZeroPolicy(master_dtype=torch.float16)
    assert (
        ZeroPolicy(master_dtype=torch.float16, accumulate_dtype=torch.float16).master_for(torch.float16).itemsize == 2
    )


def test_masters_and_sums_may_be_as_narrow_as_the_parameters():
    policy = ZeroPolicy(master_dtype=torch.bfloat16, accumulate_dtype=torch.bfloat16)
    assert policy.master_for(torch.bfloat16) is policy.accumulate_for(torch.bfloat16) is torch.bfloat16
    assert policy.master_for(torch.float32) is torch.float32


@pytest.mark.parametrize("stage", [-1, 4, 7])
def test_unknown_stages_are_rejected(stage):
    with pytest.raises(ValueError, match="stage"):
        ZeroPolicy(stage=stage)


def test_accumulators_and_masters_are_never_narrower_than_the_parameters():
    policy = ZeroPolicy()
    assert policy.accumulate_for(torch.bfloat16) is torch.float32
    assert policy.accumulate_for(torch.float64) is torch.float64
    assert policy.master_for(torch.float16) is torch.float32
    assert policy.master_for(torch.float64) is torch.float64
