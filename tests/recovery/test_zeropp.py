"""ZeRO++ from its JSON keys: close to plain stage 3, overflows are skipped, checkpoints hold exact weights."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import nn

import zcomm
import zengine
from zcomm.testing import run_ranks

NUM_STEPS = 12
STRICT = {"stage3_unit_size": 400, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}
HPZ = {"zero_hpz_partition_size": 2}
ZEROPP = {**HPZ, "zero_quantized_weights": True, "zero_quantized_gradients": True}


class Net(nn.Module):
    """A regression that it can solve."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(9, 31), nn.Tanh(), nn.Linear(31, 17), nn.Tanh(), nn.Linear(17, 1))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.layers(batch).squeeze(1) - batch[:, :3].sum(1).tanh()).square().mean()


def make(stage: int, **zero: Any) -> zengine.Engine:
    config = {
        "train_micro_batch_size_per_gpu": 32 // zcomm.group_size(),
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
        "zero_optimization": {"stage": stage, **(STRICT if stage == 3 else {}), **zero},
    }
    return zengine.initialize(model=Net(), config=config)[0]


def train(engine: zengine.Engine, until: int, spoilt: int = -1) -> list[float]:
    """Train to step `until`; in step `spoilt` one rank's data has a NaN."""
    losses = []
    for step in range(engine.global_steps, until):
        everyone = torch.randn(32, 9, generator=torch.Generator().manual_seed(step))
        mine = everyone.chunk(zcomm.group_size())[zcomm.group_rank()].clone()
        if step == spoilt and zcomm.group_rank() == 1:
            mine[0, 0] = torch.nan
        engine.backward(engine(mine))
        losses.append(engine.step().loss)
        assert engine.was_step_applied() == (step != spoilt)
    return losses


def _saves(root: str) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    plain, secondary, coded = make(3), make(3, **HPZ), make(3, **ZEROPP)
    losses = [train(engine, NUM_STEPS) for engine in (plain, secondary, coded)]
    before = coded.state_dict()
    train(coded, NUM_STEPS + 1, spoilt=NUM_STEPS)
    assert all(torch.equal(before[name], value) for name, value in coded.state_dict().items()), "skipped"
    coded.save_checkpoint(root, tag="zeropp")
    expected = train(coded, NUM_STEPS + 3)
    resumed = make(3, **ZEROPP)
    train(resumed, 1)
    resumed.load_checkpoint(root)
    assert train(resumed, NUM_STEPS + 3) == expected, "nothing of what is kept to gather from outlives a load"
    return losses, before


def _loads(root: str) -> dict[str, torch.Tensor]:
    engine = make(2)
    engine.load_checkpoint(root)
    return engine.state_dict()


def test_zeropp_trains_skips_saves_and_resumes(tmp_path: Any) -> None:
    (plain, secondary, coded), saved = run_ranks(_saves, 4, str(tmp_path))[0]
    assert secondary == plain, "bit for bit"
    assert coded != plain
    assert statistics.mean(plain[-3:]) < 0.5 * plain[0]
    assert abs(statistics.mean(coded[-3:]) - statistics.mean(plain[-3:])) < 0.05 * plain[0]
    for name, tensor in run_ranks(_loads, 2, str(tmp_path))[0].items():
        assert torch.equal(tensor, saved[name]), "exact, at another stage and world size"
