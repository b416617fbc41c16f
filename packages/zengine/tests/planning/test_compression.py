"""Compressed optimizers in the plan: memory as the ledger of a live engine has it in the compressed stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zengine
from zcomm.testing import run_ranks
from zengine.config import Facts, load, resolve
from zengine.planning.explanation import explain
from zengine.planning.sizes import Sizes, sizes

EXACT = ("compression errors", "compressed momenta", "states", "parameters", "masters")
OPTIONS: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"freeze_step": 3},
    "OneBitLamb": {"freeze_step": 3},
    "ZeroOneAdam": {"var_freeze_step": 2, "local_step_scaler": 100},
}
CASES = [("OneBitAdam", 0), ("OneBitAdam", 1), ("OneBitLamb", 0), ("OneBitLamb", 1), ("ZeroOneAdam", 0)]


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(65, 65) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.float().square().mean()


def config(name: str, stage: int, micro: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro,
        "optimizer": {"type": name, "params": {"lr": 0.01, **OPTIONS[name]}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 9_000},
        **changes,
    }


def planned(source: dict[str, Any], num_ranks: int) -> Sizes:
    plan = resolve(load(source), Facts(world_size=num_ranks, replicas=num_ranks))
    return sizes(Stack().to(plan.precision.param), plan, world_size=num_ranks, device="cpu")


def live(source: dict[str, Any]) -> dict[str, int]:
    engine = zengine.initialize(model=Stack(), config=source)[0]
    dtype, most_buffers = next(engine.parameters()).dtype, 0
    for step in range(6):
        for _ in range(engine.gradient_accumulation_steps()):
            x = torch.randn(2, 65, generator=torch.Generator().manual_seed(10 * step + engine.global_rank))
            engine.backward(engine(x.to(dtype)))
            most_buffers = max(most_buffers, engine.parts.partition.ledger()["buckets"])
            engine.step()
    assert engine.optimizer.needs_local_gradients
    found = engine.parts.partition.ledger()
    engine.close()
    return {**found, "buckets": most_buffers}


@pytest.mark.parametrize(("narrow", "micro"), [(False, 1), (False, 2), (True, 1)])
@pytest.mark.parametrize(("name", "stage"), CASES)
def test_the_plan_has_what_a_rank_holds_in_the_compressed_stage(
    name: str, stage: int, narrow: bool, micro: int
) -> None:
    source = config(name, stage, micro, **({"bf16": {"enabled": True}} if narrow else {}))
    own = planned(source, 2).memory.ledger()
    for found in run_ranks(live, 2, source):
        assert {owner: found.get(owner, 0) for owner in EXACT} == {owner: own.get(owner, 0) for owner in EXACT}
        assert found["buckets"] <= own["buckets"]
        assert set(found) <= set(own)


def test_errors_are_as_large_as_the_momenta_and_a_span() -> None:
    (found, *_) = run_ranks(live, 4, config("OneBitAdam", 0, zero_optimization={"stage": 0}))
    numel = sum(param.numel() for param in Stack().parameters())
    whole = found["compression errors"] / 4 / (1 + 1 / 4)
    assert numel <= whole <= 1.15 * numel  # the bucket is padded
    assert numel / 8 < found["compressed momenta"] < 1.2 * numel / 8


def test_one_rank_and_other_optimizers_hold_none() -> None:
    assert not planned(config("OneBitAdam", 0), 1).memory.compression
    plain = {**config("OneBitAdam", 0), "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    assert not planned(plain, 2).memory.compression


def test_the_plan_of_a_run_names_the_errors() -> None:
    source, facts = load(config("OneBitAdam", 1)), Facts(world_size=2, replicas=2)
    assert "compression errors" in explain(source, resolve(source, facts), facts, Stack(), "a stack").text()
