"""Resuming in another precision: loaded values take the dtypes of the engine that loads.

Narrower values are widened exactly; wider ones are rounded to nearest, with a message.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zengine
import zpartition

ON = {"enabled": True}
LOW = {**ON, "bf16_master_weights_and_grads": True}
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SECTIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": ON},
    "low": {"bf16": {**LOW, "bf16_optimizer_states": True}},
    "low, wide states": {"bf16": LOW},
    "fp16 low": {"fp16": {**ON, "loss_scale": 8, "fp16_master_weights_and_grads": True}},
    "autocast": {"torch_autocast": {**ON, "dtype": "fp16", "loss_scale": 8}},
}
MASTERS = {"low": BF16, "low, wide states": BF16, "fp16 low": F16}
STATES = {"low": BF16}


def made(name: str, optimizer: str = "AdamW", stage: int = 1) -> zengine.Engine:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    config = {
        "train_batch_size": 3,
        "optimizer": {"type": optimizer, "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
    }
    return zengine.initialize(model=model, config={**config, **SECTIONS[name]})[0]


def step(engine: zengine.Engine, seed: int) -> bool:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(seed))
    engine.backward(engine(x.to(engine.module[0].weight.dtype)).float().square().mean())
    return bool(engine.step())


def content(engine: zengine.Engine) -> dict[str, torch.Tensor]:
    found = {}
    for name, param in engine.module.named_parameters():
        found[name] = zpartition.safe_get_full_fp32_param(param).clone()
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{key} {name}"] = zpartition.safe_get_full_optimizer_state(param, key).clone()
    return found


WAYS = [
    ("low", "bf16"), ("low", "fp32"), ("bf16", "low"), ("low, wide states", "low"), ("low", "low, wide states"),
    ("bf16", "autocast"), ("autocast", "low"),
]  # fmt: skip
OTHERS = [("AdamW", "fp16 low", "fp32"), ("AdamW", "fp32", "fp16 low")]  # torch's states are rejected in float16


# NAdam is torch's: its states have the masters' dtype.
@pytest.mark.parametrize(
    ("optimizer", "saved", "loaded"), [*((name, *way) for name in ("AdamW", "NAdam") for way in WAYS), *OTHERS]
)
def test_a_run_may_change_its_precision_when_it_resumes(
    saved: str, loaded: str, optimizer: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = made(saved, optimizer)
    assert all(step(first, seed) for seed in range(3))
    first.save_checkpoint(str(tmp_path))
    before = content(first)
    first.close()
    other = made(loaded, optimizer, stage=2)
    with caplog.at_level(logging.WARNING, "zengine"):
        other.load_checkpoint(str(tmp_path))
    after = content(other)
    for name, value in after.items():
        is_weight = not name.startswith("exp_avg")
        if is_weight:
            assert value.dtype == MASTERS.get(loaded, F32)
        elif optimizer == "AdamW":
            assert value.dtype == STATES.get(loaded, F32)
        assert torch.equal(value.float(), before[name].to(value.dtype).float()), name
    narrower = MASTERS.get(loaded, F32).itemsize < MASTERS.get(saved, F32).itemsize
    assert ("it is rounded" in caplog.text) == narrower
    weight = other.module[0].weight
    assert torch.equal(weight, after["0.weight"].to(weight.dtype))
    assert all(step(other, seed) for seed in range(3, 6))
    other.close()
