"""MuAdam, MuAdamW and MuSGD from the config, at ZeRO stages."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import zengine
import zoptim
from zcomm.testing import run_ranks


class Width:
    """The part of mup's InfShape that optimizers read."""

    def __init__(self, wide: int, ratio: float) -> None:
        self.wide, self.ratio = wide, ratio

    def ninf(self) -> int:
        return self.wide

    def width_mult(self) -> float:
        return self.ratio

    def fanin_fanout_mult_ratio(self) -> float:
        return self.ratio


def model_of() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))
    for name, param in model.named_parameters():
        param.infshape = Width(2 if name == "2.weight" else 1, 4.0 if name == "2.weight" else 2.0)
    return model


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(step))


def _losses(name: str, stage: int) -> list[float]:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "optimizer": {"type": name, "params": {"lr": 0.05, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage},
    }
    engine = zengine.initialize(model=model_of(), config=config)[0]
    losses = []
    for step in range(6):
        loss = engine(batch(step)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.close()
    return losses


@pytest.mark.parametrize(("name", "cls"), [("MuAdam", zoptim.Adam), ("MuAdamW", zoptim.AdamW), ("MuSGD", zoptim.SGD)])
def test_every_stage_trains_like_a_loop_with_scaled_groups(name: str, cls: Any) -> None:
    model = copy.deepcopy(model_of())
    matrix = [model[2].weight]
    others = [param for param in model.parameters() if param is not matrix[0]]
    up = 2.0 if name == "MuSGD" else 1.0
    groups = [
        {"params": matrix, "lr": 0.05 / 4, "weight_decay": 0.4},
        {"params": others, "lr": 0.05 * up, "weight_decay": 0.1 / up},
    ]
    optimizer, expected = cls(groups), []
    for step in range(6):
        loss = model(batch(step)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for stage in (0, 2, 3):
        for found in run_ranks(_losses, 2, name, stage):
            assert found == pytest.approx(expected, rel=1e-5)


def test_a_model_without_base_shapes_is_told_what_to_do() -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "MuAdam", "params": {"lr": 0.1}}}
    with pytest.raises(zoptim.BaseShapesMissingError, match=r"'weight' .* mup.set_base_shapes\(model, base"):
        zengine.initialize(model=nn.Linear(2, 2), config=config)
    config["optimizer"]["params"]["lrr"] = 0.1
    with pytest.raises(zengine.config.ConfigError, match="Did you mean 'lr'"):
        zengine.initialize(model=nn.Linear(2, 2), config=config)
