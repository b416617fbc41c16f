"""Engines with every kind of small state, and a digest of all their state."""

from __future__ import annotations

import hashlib
import json
import random
from typing import Any

import numpy as np
import torch
from torch import nn

import zckpt
import zcomm
import zengine
import zpartition
from zengine.checkpoint.jsonable import encode

STRICT = {"stage3_unit_size": 100, "stage3_param_persistence_threshold": 0}
LENGTHS = [1 + (7 * index) % 5 for index in range(64)]


class Net(nn.Module):
    """Blocks that may skip tokens, dropout, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(2, 8), nn.BatchNorm1d(8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2)) for _ in range(3))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.enter(batch.to(self.enter.weight.dtype)))
        hidden = hidden.unsqueeze(1).expand(-1, 6, -1)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.float().square().mean()


def collate(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([torch.stack((sample.mean(), torch.tensor(float(len(sample))))) for sample in samples])


def ltd() -> dict[str, Any]:
    schedule = {"min_value": 2, "max_value": 6, "schedule_type": "fixed_linear"}
    schedule["schedule_config"] = {"require_steps": 9, "seq_per_step": 1}
    chosen = {"total_layer_num": 3, "random_ltd_layer_num": 1, "random_ltd_layer_id": [1]}
    section = {"enabled": True, **chosen, "model_mask_name": "", "random_ltd_schedule": schedule}
    return {"data_routing": {"enabled": True, "random_ltd": section}}


def everything_of_ours(stage: int) -> Any:
    """fp16 with a moving scale, a schedule, batches by tokens, random-LTD, our optimizer."""
    batching = {"enabled": True, "max_tokens": 20, "sequence_picking_order": "random"}
    config = {
        "train_batch_size": 4,
        "gradient_accumulation_steps": 4 // zcomm.group_size() // 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 20, "warmup_num_steps": 3}},
        "fp16": {"enabled": True, "initial_scale_power": 5, "loss_scale_window": 2},
        "zero_optimization": {"stage": stage, **STRICT},
        "data_efficiency": {
            "enabled": True,
            "data_sampling": {"enabled": True, "dynamic_batching": batching},
            **ltd(),
        },
    }
    data = [torch.full((length,), 0.1 * index) for index, length in enumerate(LENGTHS)]
    return zengine.initialize(model=Net(), config=config, training_data=data, collate_fn=collate)[0]


def everything_of_torch(stage: int) -> Any:
    """torch's optimizer and schedule, two parameter groups, samples by an index."""
    model = Net()
    groups = [{"params": model.enter.parameters(), "lr": 0.02}, {"params": [*model.norm.parameters()]}]
    groups[1]["params"] += model.blocks.parameters()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": stage == 3},
        "zero_optimization": {"stage": stage, **STRICT},
    }
    data = [torch.full((2,), 0.1 * index).sin() for index in range(40)]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.1, 0.2], total_steps=40)
    return zengine.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule, config=config, training_data=data
    )[0]


KINDS = {"ours": everything_of_ours, "torch": everything_of_torch}


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def train(engine: Any, batches: Any, count: int) -> list[Any]:
    reports: list[Any] = []
    while len(reports) < count:
        engine.backward(engine(next(batches)))
        report = engine.step()
        reports += [] if report is None else [report]
    return reports


def digest(engine: Any) -> dict[str, str]:
    """Return a digest of each part of this rank's state."""
    parts, partition = engine.parts, engine.parts.partition
    tensors = [(shard.name, shard) for shard in partition.shards()]
    tensors += [
        (f"{key}.{shard.name}", shard) for key, shard in zpartition.state_shards(engine.optimizer, partition.holders)
    ]
    hashed = hashlib.sha256()
    for name, shard in tensors:
        hashed.update(f"{name} {shard.span}".encode())
        hashed.update(shard.tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    for name, value in engine.state_dict().items():
        hashed.update(name.encode() + value.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    clock = engine.clock
    groups = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups]
    small = {
        "clock": [clock.state_dict(), clock.phase.value, clock.index],
        "schedule": parts.scheduler.state_dict(),
        "scaler": parts.scaler.state_dict(),
        "options": groups,
        "features": {f.name: f.state_dict() for f in engine._features if f.name},
        "loader": parts.loader.state_dict(),
        "random": zckpt.rng.capture(),
    }
    return {"tensors": hashed.hexdigest(), **{name: json.dumps(encode(value)) for name, value in small.items()}}
