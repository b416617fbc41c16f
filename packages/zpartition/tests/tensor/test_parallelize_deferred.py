"""Models built inside `Init`: split before they have values, and equal to plain models that were split."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

import zcomm
import zpartition
from zcomm.testing import run_ranks
from zpartition import Init, ZeroPolicy
from zpartition.tensor import parallelize, whole_state_dict
from zpartition.testing import losses_of
from zpartition.testing.tensor_models import PLAN, Block, Grouped, Language

TOKENS = torch.randint(0, 29, (2, 8), generator=torch.Generator().manual_seed(0))


class Apart(Language):
    """The last block differs between ranks, until rank 0's is broadcast."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(zcomm.group_rank())
        self.blocks.append(Block(Grouped()).double())


def _trained(how: str, stage: int) -> tuple[dict[str, Tensor], list[float], float]:
    """Return initial weights, losses of two steps, and random numbers drawn between."""
    block: Any = contextlib.nullcontext()
    if how != "plain":
        block = Init(make_buffers=True, fake_device="cpu" if how == "hidden" else "meta")
    with block:
        model = Apart()
    if how == "written":
        with zpartition.gathered(model.blocks[0].mlp.up.weight, modifier_rank=0), torch.no_grad():
            model.blocks[0].mlp.up.weight.add_(0.0)
    parallelize(model, PLAN, zcomm.consecutive_group(2))
    assert model.blocks[0].mlp.up.weight.shape == (model.blocks[0].mlp.up.out_features, 24)
    assert model.blocks[0].mlp.up.out_features in (18, 19)
    policy = ZeroPolicy(stage=stage, unit_numel=700, persist_numel=20, bucket_numel=700)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    partition = zpartition.shard(model, optimizer, policy=policy, group=zcomm.strided_group(2))
    following = torch.rand(()).item()
    state = whole_state_dict(model)
    losses = losses_of(partition, lambda: model(TOKENS), 2)
    partition.close()
    assert losses[0] != losses[1]
    return state, losses, following


def _compared(stage: int) -> list[str]:
    expected, curve, following = _trained("plain", stage)
    wrong = []
    for how in ("deferred", "hidden", "written"):
        found, losses, drawn = _trained(how, stage)
        wrong += [f"{how} {name}" for name, value in expected.items() if not torch.equal(value, found[name])]
        wrong += [f"{how} losses {losses}, not {curve}"] if losses != curve else []
        if len(set(zcomm.all_gather_object(drawn, zcomm.consecutive_group(2)))) > 1 or (
            zcomm.group_rank() < 2 and drawn != following
        ):
            wrong.append(f"{how} draws {drawn}, not {following}")
    return wrong


@pytest.mark.parametrize("stage", [1, 3])
def test_weights_losses_and_next_random_numbers_equal_a_plain_build(stage: int) -> None:
    assert run_ranks(_compared, 4, stage) == [[]] * 4
