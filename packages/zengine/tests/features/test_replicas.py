"""Replicas are compared bit by bit: one changed element on one rank is found and named on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zengine
from zcomm.testing import run_ranks
from zengine.features.replicas import hash_bits
from zengine.testing import rank_batch

_TEXT = "differs between data-parallel ranks"
BF16 = {"bf16": {"enabled": True}}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm, self.tail = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.register_buffer("seen", torch.zeros(2, 3))
        self.register_buffer("cache", torch.zeros(5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.tail(self.norm(self.body(x))).float().square().mean()
        return loss


def plant(engine: Any, what: str) -> None:
    """Change one value on this rank."""
    net: Any = engine.module
    if what == "weight":
        bits = net.body.weight.data.view(-1)[5:6].view(torch.uint8)
        bits[0] ^= 1
    elif what == "buffer":
        net.seen[1, 2] = -0.0
    elif what == "cache":
        net.cache[4] = 3.0
    elif what == "state":
        holder = engine.parts.partition.holders[0]
        holder.state(engine.optimizer)["exp_avg"].view(-1)[0] += 1.0
    elif what == "rate":
        engine.optimizer.param_groups[0]["initial_lr"] = 0.5
    elif what == "counter":
        engine.clock.samples += 1


def _drifts(what: str, stage: int, config: dict[str, Any]) -> str:
    engine = zengine.initialize(
        model=Net(),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 0,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            "zero_optimization": {"stage": stage},
            "verify_replicas_every": 2,
            **config,
        },
    )[0]
    dtype = engine.module.tail.weight.dtype
    for index in range(5):
        if index == 3 and torch.distributed.get_rank() == 1:
            plant(engine, what)
        engine.backward(engine(rank_batch(index).to(dtype)))
        try:
            engine.step()
        except zengine.RanksDisagree as error:
            assert engine.clock.steps == 3
            return str(error)
        finally:
            if index == 4:
                engine.close()
    return ""


@pytest.mark.parametrize(
    ("what", "stage", "config", "text"),
    [
        ("buffer", 0, {}, f"buffer seen {_TEXT}, first in element [1, 2]: 0.0 on rank 0, -0.0 on rank 1"),
        ("cache", 3, {}, f"buffer cache {_TEXT}, first in element [4]: 0.0 on rank 0, 3.0 on rank 1"),
        ("weight", 0, {}, f"weight body.weight {_TEXT}, first in element [1, 2]: "),
        ("weight", 2, BF16, f"working copy of weight body.weight {_TEXT}, first in element [1, 2]: "),
        ("state", 0, {}, f"optimizer state exp_avg of tail.bias {_TEXT}, first in element [0]: "),
        ("rate", 1, {}, f"param_groups[0]['initial_lr'] {_TEXT}: missing on rank 0, 0.5 on rank 1"),
        ("counter", 0, {}, f"counter 'samples' {_TEXT}: 12 on rank 0, 13 on rank 1"),
    ],
)
def test_what_is_planted_on_one_rank_is_named_on_all(
    what: str, stage: int, config: dict[str, Any], text: str
) -> None:
    first, second = run_ranks(_drifts, 2, what, stage, config)
    assert first == second
    assert f"verify_replicas_every = 2: in step 4, {text}" in first
    assert "Load the newest checkpoint from before the change" in first


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("config", [{}, BF16], ids=["fp32", "bf16"])
def test_a_run_without_drift_passes(stage: int, config: dict[str, Any]) -> None:
    assert run_ranks(_drifts, 2, "nothing", stage, config) == ["", ""]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]
)
def test_a_hash_changes_with_any_element_and_with_the_order(dtype: torch.dtype) -> None:
    tensor = (torch.arange(37) % 2).to(dtype).view(37, 1)
    original = hash_bits(tensor).item()
    assert hash_bits(tensor.clone()).item() == original
    for index in range(37):
        other = tensor.clone()
        other[index] = 1 - other[index].to(torch.int64).to(dtype) if dtype != torch.bool else ~other[index]
        assert hash_bits(other).item() != original
    assert hash_bits(tensor.flip(0).roll(1)).item() != original or torch.equal(tensor.flip(0).roll(1), tensor)
    assert hash_bits(torch.tensor([0.0, -0.0])).item() != hash_bits(torch.tensor([-0.0, 0.0])).item()
    nan = torch.tensor([float("nan"), 1.0])
    assert hash_bits(nan).item() == hash_bits(nan.clone()).item()


def test_off_is_absent() -> None:
    engine = zengine.initialize(model=nn.Linear(2, 1), config={"train_batch_size": 1})[0]
    assert not [each for each in engine._features if type(each).__name__ == "VerifyReplicas"]
    engine.close()
