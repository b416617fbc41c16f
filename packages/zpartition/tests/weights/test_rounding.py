"""Rounded weights beside masters that keep their values."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zpartition
from zcomm.testing import run_ranks
from zpartition import ZeroPolicy


def coarse(name: str, weight: torch.Tensor) -> None:
    weight.copy_((weight * 4).round() / 4 + len(name))


def copied(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def _rounded(stage: int) -> tuple[bool, ...]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = ZeroPolicy(stage=stage, master_dtype=torch.float32)
    partition = zpartition.shard(model, optimizer, policy=policy)
    names = {"0.weight", "1.weight"}
    before = {shard.name: shard.tensor.clone() for shard in partition.shards()}
    found = [copied(model)]
    partition.round_by(coarse, names)
    partition.round_weights()
    found.append(copied(model))
    x = torch.ones(2, 6, dtype=torch.bfloat16)
    with torch.no_grad():
        output = model(x)
        hidden = x @ found[1]["0.weight"].T + found[1]["0.bias"]
        expected = hidden @ found[1]["1.weight"].T + found[1]["1.bias"]
    is_rounded = all(
        torch.equal(found[1][name], (value * 4).round() / 4 + len(name) if name in names else value)
        for name, value in found[0].items()
    )
    partition.publish()  # casts the masters, and rounds again
    again = copied(model)
    after = {shard.name: shard.tensor for shard in partition.shards()}
    partition.close()
    return (
        is_rounded,
        torch.allclose(output, expected, rtol=2e-2, atol=1e-1),
        all(torch.equal(again[name], found[1][name]) for name in again),
        all(torch.equal(before[name], after[name]) for name in before),
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_modules_see_rounded_weights_and_masters_keep_theirs(stage: int) -> None:
    assert run_ranks(_rounded, 2, stage) == [(True,) * 4] * 2


def test_weights_that_are_their_own_masters_are_rejected() -> None:
    model = nn.Linear(3, 3)
    partition = zpartition.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=ZeroPolicy())
    with pytest.raises(ValueError, match=r"weight \(1 of 1 weights\) has no master of its own"):
        partition.round_by(coarse, {"weight"})
    partition.round_weights()
    partition.close()
