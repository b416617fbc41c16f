"""Experts of a model built inside `Init`: sharded before they have values, and equal to those of a plain build."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zcomm
import zpartition
from zcomm.testing import run_ranks
from zpartition import Init, ZeroPolicy
from zpartition.experts import ExpertMLP, ExpertParameter, MoE, distribute
from zpartition.tensor import whole_state_dict
from zpartition.testing import losses_of
from zpartition.testing.expert_models import MoELanguageModel

TOKENS = torch.randint(0, 23, (2, 7), generator=torch.Generator().manual_seed(1))


class Stack(nn.Module):
    """Experts as in Transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.down_proj = nn.Parameter(torch.empty(4, 6, 6))
        nn.init.normal_(self.down_proj)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        y = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            tokens, slots = torch.where(top_k_index == expert)
            y = y.index_add(
                0, tokens, hidden_states[tokens] @ self.down_proj[expert].t() * top_k_weights[tokens, slots, None]
            )
        return y


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 4)
        self.experts = Stack()

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.gate(x).softmax(-1).topk(2, dim=-1)
        y: Tensor = self.experts(x, index, weights)
        return y


class Model(nn.Module):
    """Both kinds of stacks: Transformers' and ours, of copies and of several layers."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = Sparse()
        self.language = MoELanguageModel()

    def forward(self, tokens: Tensor) -> Tensor:
        x = nn.functional.one_hot(tokens[0] % 6, 6).float()
        return self.language(tokens) + self.sparse(x).square().mean()


def _trained(how: str, stage: int) -> tuple[dict[str, Tensor], list[float], int]:
    """Return initial weights, losses of two steps, the next random numbers, and the local elements of one stack."""
    torch.manual_seed(zcomm.group_rank())  # rank 0's numbers count
    block: Any = contextlib.nullcontext()
    if how != "plain":
        block = Init(fake_device="cpu" if how == "hidden" else "meta")
    if how == "partly":
        sparse = Sparse()
    with block:
        model = Model()
    if how == "partly":
        model.sparse = sparse
    after = torch.get_rng_state()
    weight = model.language.blocks[0].moe.experts.get_parameter("stacked.up.weight")
    if how == "written":
        with zpartition.gathered(weight, modifier_rank=1), torch.no_grad():
            weight.copy_(torch.full_like(weight, zcomm.group_rank()))
    distribute(model, zcomm.consecutive_group(2))
    assert isinstance(weight, ExpertParameter)
    policy = ZeroPolicy(stage=stage, unit_numel=700, persist_numel=20, bucket_numel=700)
    partition = zpartition.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=policy)
    if how == "plain":  # which draws nothing when values are made
        torch.set_rng_state(after)
    following = torch.rand(()).item() if zcomm.group_rank() == 0 else 0.0
    with zpartition.gathered(model):
        state = whole_state_dict(model)
    losses = losses_of(partition, lambda: model(TOKENS), 2)
    partition.close()
    assert losses[0] != losses[1]
    return state, [*losses, following], weight.numel()


def _compared(stage: int) -> list[str]:
    expected, curve, numel = _trained("plain", stage)
    wrong = []
    for how in ("deferred", "partly", "written") if stage else ("hidden",):
        found, losses, own = _trained(how, stage)
        differ = [name for name, value in expected.items() if not torch.equal(value, found[name])]
        edited = "language.blocks.0.moe.experts.stacked.up.weight"
        if how == "written":
            assert differ == [edited]
            assert bool((found[edited] == 1).all())
        elif differ or losses != curve:
            wrong.append(f"{how}: {differ} {losses} {curve}")
        assert own == numel
    return wrong


@pytest.mark.parametrize("stage", [0, 3])
def test_weights_losses_and_next_random_numbers_equal_a_plain_build(stage: int) -> None:
    assert run_ranks(_compared, 4, stage) == [[]] * 4


def _seeded_apart() -> Tensor:
    """Return the experts of all tensor ranks, each of which would have drawn different ones."""
    torch.manual_seed(zcomm.group_rank())
    with Init():
        layer = MoE(4, ExpertMLP(4, 6), 2, enable_expert_tensor_parallelism=True)
    distribute(layer, zcomm.consecutive_group(1), tensor=torch.distributed.group.WORLD)
    zpartition.shard(layer, group=zcomm.consecutive_group(1))
    return whole_state_dict(layer)["experts.stacked.up.weight"]


def test_tensor_ranks_have_parts_of_the_same_experts() -> None:
    torch.manual_seed(0)
    expected = MoE(4, ExpertMLP(4, 6), 2).experts.get_parameter("stacked.up.weight")
    for found in run_ranks(_seeded_apart, 2):
        assert torch.equal(found, expected)
