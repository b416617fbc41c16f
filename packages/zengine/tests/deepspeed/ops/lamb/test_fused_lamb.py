"""FusedLamb under ZeRO: tensors that are cut over ranks keep their norms."""

from __future__ import annotations

import torch
from torch import nn

from zcomm.testing import run_ranks
from zengine import deepspeed
from zengine.deepspeed.ops.lamb import FusedLamb


def train(stage: int) -> torch.Tensor:
    torch.manual_seed(0)
    net = nn.Linear(40, 30)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    optimizer = FusedLamb(net.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=net, optimizer=optimizer, config=config)[0]
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 40)).square().mean())
        engine.step()
    return deepspeed.utils.safe_get_full_fp32_param(net.weight)


def check() -> bool:
    return bool(torch.allclose(train(0), train(2), atol=1e-6))


def test_lamb_of_a_script_is_the_same_split_and_whole():
    assert run_ranks(check, 2) == [True, True]
