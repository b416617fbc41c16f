"""Offloaded states: training continues exactly after a reload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zengine

CONFIG = {
    "train_batch_size": 4,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "zero_optimization": {"stage": 2},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.bfloat16()).float().square().mean()


def step(engine: Any, seed: int) -> float:
    engine.backward(engine(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))))
    return float(engine.step().loss)


def test_losses_after_a_pause_are_those_without_one(tmp_path: Path) -> None:
    with_pause, without = (zengine.initialize(model=Net(), config=CONFIG)[0] for _ in range(2))
    for seed, options in enumerate(
        ({}, {"include": ["optim_states", "hp_params"]}, {"device": "nvme", "nvme_path": str(tmp_path)})
    ):
        assert step(with_pause, seed) == step(without, seed)
        with_pause.offload_states(**options)
        assert with_pause.parts.partition.ledger()["states"] == 0
        with pytest.raises(RuntimeError, match="reload_states"):
            with_pause.save_checkpoint(str(tmp_path / "saved"))
        with_pause.reload_states()
    assert step(with_pause, 9) == step(without, 9)
    for engine in (with_pause, without):
        engine.close()


@pytest.mark.parametrize("options", [{"include": ["weights"]}, {"device": "gpu"}, {"device": "nvme"}])
def test_what_it_does_not_know_is_refused(options: dict[str, Any]) -> None:
    engine = zengine.initialize(model=Net(), config=CONFIG)[0]
    with pytest.raises(ValueError, match=r"include takes optim_states.*or \"nvme\" with a nvme_path"):
        engine.offload_states(**options)
    engine.close()
