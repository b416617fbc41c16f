"""Balancing biases change at each boundary by the tokens of all ranks, and are saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
import zengine
from zcomm.testing import run_ranks
from zpartition.experts import ExpertMLP, MoE


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.moe = MoE(4, ExpertMLP(4, 6), num_experts=4, ep_size=2, k=2, drop_tokens=False)
        self.moe.gate.balance_by_bias(0.001)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.moe(x)[0]).square().mean()


def _moved(root: Path, bf16: bool) -> tuple[list[float], list[float], list[float]]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "bf16": {"enabled": bf16},
    }
    module = Net()
    module.moe.gate.bias.fill_(0.5)  # next to which a step is less than half a step of bfloat16
    engine = zengine.initialize(model=module, config=config)[0]
    total = torch.zeros(4, dtype=torch.int64)
    for micro in range(2):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * micro + zcomm.group_rank()))
        x = x.bfloat16() if bf16 else x
        before = module.moe.gate.load.clone()
        total += module.moe(x)[2]
        module.moe.gate.load.copy_(before)  # that was to see, and does not count
        engine.backward(engine(x))
        engine.step()
    zcomm.all_reduce(total)
    expected = 0.5 + 0.001 * torch.sign(total.double().mean() - total)
    engine.save_checkpoint(str(root), "moved")
    engine.close()
    other = Net()
    engine = zengine.initialize(model=other, config=config)[0]
    engine.load_checkpoint(str(root), "moved")
    engine.close()
    return expected.tolist(), module.moe.gate.bias.tolist(), other.moe.gate.bias.tolist()


@pytest.mark.parametrize("bf16", [False, True])
def test_a_step_moves_the_bias_by_the_tokens_of_all_ranks(tmp_path: Path, bf16: bool) -> None:
    for expected, found, loaded in run_ranks(_moved, 2, tmp_path, bf16):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=0, atol=1e-6)
        assert any(each != 0.5 for each in found)
        assert loaded == found
