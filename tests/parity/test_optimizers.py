"""Every elementwise optimizer of a config trains through the engine as without it, at every stage."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
import zengine
import zoptim
from zcomm.testing import run_ranks

NUM_STEPS = 6
STAGES = (0, 1, 2, 3)
STRICT = {"stage3_unit_size": 500, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}

ELEMENTWISE: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1},
    "Adam": {"lr": 1e-2, "adam_w_mode": False, "weight_decay": 0.01},
    "sgd": {"lr": 0.2, "momentum": 0.9, "nesterov": True},
    "Adagrad": {"lr": 0.05},
    "Lion": {"lr": 1e-3, "weight_decay": 0.1},
}
FORMATS = ("fp32", "bf16", "8bit")


class Tiny(nn.Module):
    """An embedding, a matrix of each kind of shape, vectors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(13, 16)
        self.body = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 16))
        self.head = nn.Linear(16, 13)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(batch[:, 0])
        return nn.functional.cross_entropy(self.head(hidden + self.body(hidden)), batch[:, 1])


def batches(world_size: int) -> torch.Tensor:
    """Tokens and targets (step, rank, sample, 2)."""
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(0, 13, (NUM_STEPS, world_size, 8), generator=generator)
    return torch.stack((tokens, (3 * tokens + 1) % 13), dim=-1)


def alone(name: str, params: dict[str, Any], world_size: int) -> list[float]:
    """Oracle: the optimizer without the engine, on all ranks' data in one batch."""
    model = Tiny()
    optimizer = zoptim.make_optimizer(name, list(model.named_parameters()), params)
    losses = []
    for step in batches(world_size):
        loss = model(step.flatten(0, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def through_the_engine(name: str, params: dict[str, Any], stage: int) -> list[float]:
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 0,
        "optimizer": {"type": name, "params": params},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000, **STRICT},
    }
    engine = zengine.initialize(model=Tiny(), config=config)[0]
    losses = []
    for step in batches(zcomm.group_size()):
        engine.backward(engine(step[zcomm.group_rank()]))
        losses.append(engine.step().loss)
    engine.close()
    return losses


def all_stages(name: str, options: list[dict[str, Any]]) -> list[list[float]]:
    return [through_the_engine(name, params, stage) for params in options for stage in STAGES]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_have_the_curve_of_the_optimizer_without_the_engine(name, world_size):
    expected = alone(name, ELEMENTWISE[name], world_size)
    assert expected[-1] < 0.97 * expected[0]
    for by_stage in run_ranks(all_stages, world_size, name, [ELEMENTWISE[name]]):
        for losses in by_stage:
            assert losses == pytest.approx(expected, rel=1e-5)
            assert losses == by_stage[0]


@pytest.mark.parametrize("name", ["AdamW", "sgd"])
def test_stages_agree_bit_for_bit_in_every_state_format_and_learn_as_well(name):
    options = [{**ELEMENTWISE[name], "state_dtype": state_dtype} for state_dtype in FORMATS]
    ours = run_ranks(all_stages, 2, name, options)
    fp32, *others = [ours[0][start : start + 4] for start in (0, 4, 8)]
    assert all(by_stage == [by_stage[0]] * 4 for by_stage in (fp32, *others))
    for by_stage in others:
        assert by_stage[0] != fp32[0]  # the formats do differ
        assert by_stage[0] == pytest.approx(fp32[0], rel=0.03)
    assert all(losses == other for losses, other in itertools.pairwise(ours))
