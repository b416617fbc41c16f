"""Expert and tensor parallelism of the same experts (`enable_expert_tensor_parallelism`), on 2 x 2 ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zcomm
import zengine
from zcomm.testing import run_ranks
from zpartition.experts import ExpertMLP, MoE
from zpartition.tensor import ColumnLinear
from zpartition.testing.tensor_models import WIDTH, Gated

STEPS = 3


class Net(nn.Module):
    """A gated MLP, then experts that tensor ranks split."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = Gated(8)
        options: dict[str, Any] = {"enable_expert_tensor_parallelism": True, "top2_2nd_expert_sampling": False}
        self.moe = MoE(WIDTH, ExpertMLP(WIDTH, 8, "gelu", bias=True), 4, 1, 2, **options)
        self.last = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y, aux_loss, _ = self.moe(x + self.first(x))
        return self.last(x + y).sin().square().mean() + 0.1 * aux_loss


class Rows(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))


def rows(step: int, replica: int) -> Tensor:
    return torch.stack([Rows()[6 * replica + index] for index in range(6)]) * (step + 1)


def alone() -> list[float]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        total = 0.0
        for replica in range(2):
            loss = model(rows(step, replica)) / 2
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def _trained() -> list[list[float]]:
    found = []
    for stage in (0, 1, 3):
        config = {
            "train_micro_batch_size_per_gpu": 6,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20},
            "tensor_parallel": {"autotp_size": 2},
            "expert_parallel": {"enabled": True, "autoep_size": 2},
        }
        model = Net()
        engine = zengine.initialize(model=model, training_data=Rows(), config=config)[0]
        assert isinstance(model.first.up, ColumnLinear)
        inner = model.moe.experts.get_parameter("stacked.up.weight").shape
        assert stage == 3 or tuple(inner) == (2, 4, WIDTH)
        losses = []
        for step in range(STEPS):
            engine.backward(engine(rows(step, engine.parts.groups.get_data_parallel_rank())))
            losses.append(engine.step().loss)
        found.append(losses)
        engine.close()
    assert zcomm.group_size() == 4
    return found


def test_split_experts_have_the_curves_of_one_process() -> None:
    """For whole experts on each tensor rank see test_tensor_pairs.py."""
    expected = alone()
    for rank in run_ranks(_trained, 4):
        for losses in rank:
            assert losses == pytest.approx(expected, abs=1e-5)
