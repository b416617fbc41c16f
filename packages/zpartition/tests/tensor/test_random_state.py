"""Random numbers: equal where activations are whole, different where they are split, the same when recomputed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zcomm
from zcomm.testing import run_ranks
from zpartition.layout.model_parallel import ModelParallelGroup
from zpartition.tensor import Column, Gather, NormShard, Row, Rule, Scatter, TensorPlan, parallelize
from zpartition.tensor.random_state import TPRandomState

WIDTH = 64


class Noisy(nn.Module):
    """Two columns, dropout, a row, dropout; records the dropped elements."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.seen: list[tuple[list[bool], list[bool]]] = []
        self.breaks = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x) + self.gate(x)
        ones = nn.functional.dropout(torch.ones_like(y), training=self.training)
        if self.breaks:
            raise ArithmeticError
        z = self.down(y * ones)
        twos = nn.functional.dropout(torch.ones_like(z), training=self.training)
        self.seen.append(((ones[0] > 0).tolist(), (twos[0] > 0).tolist()))
        return z * twos


class Two(nn.Module):
    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.blocks, self.end = nn.LayerNorm(WIDTH), nn.ModuleList([Noisy(), Noisy()]), nn.Identity()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.end(x)


PLAN = TensorPlan([Rule("**.up", Column()), Rule("**.gate", Column()), Rule("**.down", Row())])


def _masks() -> dict[str, Any]:
    found: dict[str, Any] = {}
    torch.manual_seed(zcomm.group_rank())  # ranks that differ are made equal
    model = Two()
    torch.manual_seed(zcomm.group_rank())
    parallelize(model, PLAN)
    x = torch.ones(2, WIDTH)
    before = torch.get_rng_state()
    model(x)
    found["masks"] = [block.seen[0] for block in model.blocks]
    found["next"] = torch.rand(()).item()  # as many draws on all ranks
    for reentrant in (True, False):
        torch.set_rng_state(before)
        again = copy.deepcopy(model)
        again.reentrant = reentrant
        again(x.clone().requires_grad_()).sum().backward()
        seen = [[masks for masks, _ in block.seen[-2:]] for block in again.blocks]
        found[f"recomputed, reentrant {reentrant}"] = [first == second for first, second in seen]
        found[f"as without it, reentrant {reentrant}"] = [s[0] for s in seen] == [m for m, _ in found["masks"]]
    torch.set_rng_state(before)
    broken = copy.deepcopy(model)
    broken.blocks[0].breaks = True
    with pytest.raises(ArithmeticError):
        broken(x)
    found["after an exception"] = torch.rand(()).item()
    model.eval()
    torch.set_rng_state(before)
    model(x)
    found["evaluation draws nothing"] = torch.equal(torch.get_rng_state(), before)
    return found


def test_random_numbers_are_equal_for_whole_activations_and_differ_for_parts() -> None:
    one, other = run_ranks(_masks, 2)
    for (parts, whole), (other_parts, other_whole) in zip(one["masks"], other["masks"]):
        assert whole == other_whole
        assert parts != other_parts
        assert 5 < sum(parts) < WIDTH // 2 - 5
    assert one["masks"][0] != one["masks"][1]
    for rank in (one, other):
        for name in ("recomputed, reentrant True", "recomputed, reentrant False"):
            assert rank[name] == [True, True]
        assert rank["as without it, reentrant True"]
        assert rank["as without it, reentrant False"]
        assert rank["evaluation draws nothing"]
    assert one["next"] == other["next"]
    assert one["after an exception"] == other["after an exception"]


def _tokens() -> tuple[list[Any], float]:
    model = Two()
    rules = [*PLAN.rules, Rule("norm", Scatter()), Rule("end", Gather())]
    model.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(WIDTH), block) for block in model.blocks])
    parallelize(model, TensorPlan([*rules, Rule("blocks.*.0", NormShard(gathers=True))], sequence_dim=0))
    model(torch.ones(4, WIDTH))
    return [block[1].seen[0] for block in model.blocks], torch.rand(()).item()


def test_tokens_split_over_ranks_get_different_masks() -> None:
    (one, after), (other, also) = run_ranks(_tokens, 2)
    for (parts, tokens), (other_parts, other_tokens) in zip(one, other):
        assert parts != other_parts
        assert tokens != other_tokens
    assert after == also


def test_one_rank_draws_nothing() -> None:
    before = torch.get_rng_state()
    random_state = TPRandomState(ModelParallelGroup(None))
    random_state.diverge(torch.ones(1))
    assert torch.equal(torch.get_rng_state(), before)
    assert random_state.saved_states == ()
