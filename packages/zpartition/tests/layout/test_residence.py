"""How much of a model may be whole at stage 3, and that stage 3 needs less memory than stage 2."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zpartition
from zpartition import ReduceAt, ZeroPolicy
from zpartition.layout.residence import Residence, residence, working_numel

CHAIN = {"a": 10, "b": 30, "c": 10, "d": 10}


def test_two_successive_calls_and_what_encloses_them_are_whole() -> None:
    assert working_numel({}) == 0
    assert working_numel({"a": 7}) == 7
    assert working_numel(CHAIN) == 40
    assert working_numel({"": 5, "a": 10, "a.inner": 2, "b": 10}) == 27


def test_a_limit_of_the_policy_lets_units_stay() -> None:
    default, limited = ZeroPolicy(stage=3), ZeroPolicy(stage=3, max_live_numel=50)
    assert residence(CHAIN, default, 4) == Residence(0, 40, 40, 40)
    assert residence(CHAIN, limited, 4) == Residence(50, 60, 60)
    assert residence({"": 5, **CHAIN}, limited, 4) == Residence(50, 60, 65)


def test_nothing_is_gathered_ahead_where_that_takes_all_that_sharding_saves() -> None:
    policy, quarters = ZeroPolicy(stage=3), dict.fromkeys("abcd", 10)
    assert residence(quarters, policy, 2).ahead_numel == 10
    assert residence(quarters, policy, 4).ahead_numel == 20


class Language(nn.Module):
    """An embedding, blocks and a head."""

    def __init__(self, words: int, depth: int, *, is_tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, 256)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
            for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(256), nn.Linear(256, words, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight


def chain(depth: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(depth)))


MODELS = {
    "tied": lambda: Language(4096, 8, is_tied=True),
    "untied": lambda: Language(4096, 16, is_tied=False),
    "deep": lambda: Language(2048, 48, is_tied=True),
    "four layers": lambda: chain(4),
    "twenty layers": lambda: chain(20),
}


@pytest.mark.parametrize("world_size", [2, 4, 64])
@pytest.mark.parametrize("name", MODELS)
def test_each_stage_needs_less_than_the_one_before(name: str, world_size: int) -> None:
    with torch.device("meta"):
        model = MODELS[name]()
    numel = sum(param.numel() for param in model.parameters())
    assert max(p.numel() for p in model.parameters()) <= numel / 4

    def total_bytes(stage: int) -> int:
        moment = ReduceAt.BOUNDARY if stage < 2 else ReduceAt.MICRO_STEP  # the defaults with accumulation
        policy = ZeroPolicy(stage=stage, reduce_at=moment, persist_numel=0)
        planned = zpartition.plan(
            model, policy=policy, world_size=world_size, optimizer=torch.optim.AdamW, num_backwards=2
        )
        return planned.total_bytes

    totals = [total_bytes(stage) for stage in range(4)]
    assert totals == sorted(set(totals), reverse=True)
