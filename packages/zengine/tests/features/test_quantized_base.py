"""QLoRA: a frozen base in 8-bit codes (a uint8 parameter with a scale, as bitsandbytes' Params4bit) and LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zengine
import zpartition
from zcomm.testing import run_ranks


class Codes(nn.Parameter):
    """Codes of a weight; `scale` decodes them."""

    scale: float

    def __new__(cls, weight: torch.Tensor) -> Codes:
        scale = float(weight.abs().max()) / 127
        codes: Any = torch.Tensor._make_subclass(cls, ((weight / scale).round() + 128).to(torch.uint8), False)
        codes.scale = scale
        return codes  # type: ignore[no-any-return]


class Adapted(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = Codes(torch.randn(outputs, inputs))
        self.down, self.up = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = (self.base.to(torch.float32) - 128) * self.base.scale
        return nn.functional.linear(x, weight.to(x.dtype)) + self.up(self.down(x))


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Adapted(4, 16), nn.Tanh(), Adapted(16, 2))


def trained(net: nn.Module) -> list[nn.Parameter]:
    return [param for param in net.parameters() if param.requires_grad]


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(2 * step + rank))


def _train(rank: int, stage: int, folder: str) -> list[float]:
    net = make()
    codes = [param.detach().clone() for param in net.parameters() if not param.requires_grad]
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.0}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}
        if stage == 3
        else {"stage": 2},
    }
    engine = zengine.initialize(model=net, model_parameters=trained(net), config=config)[0]
    losses = []
    for step in range(3):
        engine.backward(engine(batch(step, rank)).square().mean())
        losses.append(engine.step().loss)
        if step == 1:
            engine.save_checkpoint(folder)
            engine.load_checkpoint(folder)
    with zpartition.gathered(net):
        frozen = [param.detach().clone() for param in net.parameters() if not param.requires_grad]
    assert all(
        found.dtype == torch.uint8 and torch.equal(found, code) for found, code in zip(frozen, codes, strict=True)
    )
    engine.close()
    return losses


def _on_rank(stage: int, folder: str) -> list[float]:
    return _train(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0, stage, folder)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_frozen_base_of_codes_trains_as_in_plain_torch(tmp_path: Path, stage: int) -> None:
    net = make()
    optimizer = torch.optim.AdamW(trained(net), lr=0.05, weight_decay=0.0)
    expected = []
    for step in range(3):
        optimizer.zero_grad()
        loss = torch.stack([net(batch(step, rank)).square().mean() for rank in range(2)]).mean()
        loss.backward()
        optimizer.step()
        expected.append(float(loss))
    for losses in run_ranks(_on_rank, 2, stage, str(tmp_path)):
        assert losses == pytest.approx(expected, rel=1e-5)
