"""Checkpoints resume between tiers (device, host, disk) and world sizes with equal results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zcomm
import zengine
import zpartition
from zcomm.testing import run_ranks

STRICT = {"stage3_unit_size": 20_000, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}
KINDS = [
    ("AdamW", {"lr": 0.02}),
    ("AdamW", {"lr": 0.02, "state_dtype": "8bit"}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
]
KEYS = {"AdamW": ("exp_avg", "exp_avg_sq"), "SGD": ("momentum_buffer",)}


class Net(nn.Module):
    """12,521 parameters, so that four ranks have shards of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(9, 64), nn.Tanh(), nn.Linear(64, 180), nn.Tanh(), nn.Linear(180, 1))

    def forward(self, batch: Tensor) -> Tensor:
        x = batch.to(self.layers[0].weight.dtype)
        return (self.layers(x[:, :9]).squeeze(1) - x[:, 9]).square().mean()


def make(kind: tuple[str, dict[str, Any]], stage: int, folder: str) -> zengine.Engine:
    offload = {"device": "nvme", "nvme_path": folder} if folder else {"device": "none"}
    config = {
        "train_micro_batch_size_per_gpu": 8 // zcomm.group_size(),
        "bf16": {"enabled": True},
        "optimizer": {"type": kind[0], "params": kind[1]},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
        "gradient_clipping": 0.01,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 20_000, "offload_optimizer": offload, **STRICT},
    }
    return zengine.initialize(model=Net(), config=config)[0]


def train(engine: zengine.Engine, steps: range) -> list[float]:
    losses = []
    for step in steps:
        batch = torch.randn(8, 10, generator=torch.Generator().manual_seed(step))
        rows = 8 // zcomm.group_size()
        part = batch[zcomm.group_rank() * rows :][:rows]
        engine.backward(engine(part))
        report = engine.step()
        assert report
        losses.append(report.loss)
    return losses


def values(engine: zengine.Engine) -> dict[str, Tensor]:
    found = {name: value.clone() for name, value in engine.state_dict().items()}
    for name, param in engine.module.named_parameters():
        found[f"master of {name}"] = zpartition.safe_get_full_fp32_param(param)
        for key in KEYS[type(engine.optimizer).__name__]:
            found[f"{key} of {name}"] = zpartition.safe_get_full_optimizer_state(param, key)
    return found


def _train_and_save(root: str, folder: str) -> list[dict[str, Tensor]]:
    found = []
    for index, kind in enumerate(KINDS):
        engine = make(kind, 1 + index, folder)
        train(engine, range(3))
        engine.save_checkpoint(f"{root}/{index}")
        found.append(values(engine))
        train(engine, range(3, 5))
        found.append(values(engine))
        engine.close()
    return found


def _load_and_train(root: str, folder: str) -> list[dict[str, Tensor]]:
    found = []
    for index, kind in enumerate(KINDS):
        engine = make(kind, 3 - index, folder)
        train(engine, range(10, 11))  # values that the load replaces
        engine.load_checkpoint(f"{root}/{index}")
        found.append(values(engine))
        train(engine, range(3, 5))
        found.append(values(engine))
        engine.close()
    return found


@pytest.mark.parametrize("saved_on_disk", [True, False])
def test_a_run_resumes_on_another_tier_with_the_same_results(saved_on_disk: bool, tmp_path: Path) -> None:
    root, nvme = str(tmp_path / "checkpoint"), str(tmp_path / "nvme")
    before, after = (nvme, "") if saved_on_disk else ("", nvme)
    saved = run_ranks(_train_and_save, 2, root, before)[0]
    for loaded in run_ranks(_load_and_train, 4, root, after):
        for was, now in zip(saved[::2], loaded[::2]):
            assert was.keys() == now.keys()
            assert all(torch.equal(was[name], now[name]) for name in was)
    for same in run_ranks(_load_and_train, 2, root, after):  # at the same world size the run resumes bit for bit
        for was, now in zip(saved, same):
            assert [name for name in was if not torch.equal(was[name], now[name])] == []
