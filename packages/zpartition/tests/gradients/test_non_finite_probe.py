"""Non-finite probe: names the rank and parameter of a NaN before the reduction."""

from __future__ import annotations

import torch
from torch import nn

import zcomm
from zcomm.testing import run_ranks
from zpartition import ZeroPolicy, shard
from zpartition.gradients.bucket import PROBED_STEPS, NonFiniteProbe


def _sightings(stage: int) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    partition = shard(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=ZeroPolicy(stage=stage))
    seen = []
    for is_on in (False, True):
        if is_on:
            partition.non_finite_probe.begin()
        hook = model[1].bias.register_hook(lambda grad: grad * float("nan") if zcomm.group_rank() == 1 else grad)
        with partition.micro_step():
            model(torch.ones(1, 2)).sum().backward()
        hook.remove()
        assert any(not gradient.isfinite().all() for gradient in partition.finish_gradients()) or stage > 0
        seen.append(partition.non_finite_probe.first_name)
        partition.zero_grad()
        seen.append(partition.non_finite_probe.first_name)
    partition.close()
    return seen


def test_only_the_rank_that_had_it_sees_it_and_only_when_it_looks() -> None:
    for stage in (0, 2, 3):
        assert run_ranks(_sightings, 2, stage) == [["", "", "", ""], ["", "", "1.bias", ""]]


def test_it_looks_for_some_steps_and_begins_anew() -> None:
    non_finite_probe = NonFiniteProbe()
    non_finite_probe.begin()
    for _ in range(PROBED_STEPS):
        non_finite_probe.step_over()
    assert non_finite_probe.steps_left == 1
    non_finite_probe.begin()
    for _ in range(PROBED_STEPS + 2):
        non_finite_probe.step_over()
    assert non_finite_probe.steps_left == 0
