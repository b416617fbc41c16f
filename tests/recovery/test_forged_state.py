"""A load succeeds with values that make sense, or is refused by one named error and has changed nothing, on any rank.

Each value beside the tensors of a real checkpoint is forged in turn (forging.py); a part of the forgeries, drawn with
a seed, is enough for a run of the suite, and ZENGINE_FORGERIES=all tries every one.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forging import Forgery, read_manifest, some_forgeries, write_forged
from torch import nn

import zckpt
import zcomm
import zengine
import zpartition
from zcomm.testing import run_ranks
from zengine.jsonable import encode

STRICT = {"stage3_unit_size": 100, "stage3_param_persistence_threshold": 0}
LENGTHS = [1 + (7 * index) % 5 for index in range(64)]
COUNT = 10**6 if os.environ.get("ZENGINE_FORGERIES") == "all" else 260


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
    """All that this rank's engine holds, thing by thing."""
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
        "features": {f.name: f.state_dict() for f in engine.features if f.name},
        "loader": parts.loader.state_dict(),
        "random": zckpt.rng.capture(),
    }
    return {"tensors": hashed.hexdigest(), **{name: json.dumps(encode(value)) for name, value in small.items()}}


def forge_and_load(root: str, kind: str, stage: int, count: int, seed: int) -> list[str]:
    """What is wrong: for each forgery that is neither taken well nor refused well."""
    seed_all(1)
    engine = KINDS[kind](stage)
    batches = iter(engine.training_dataloader)
    train(engine, batches, 1)
    engine.save_checkpoint(root, "victim")
    train(engine, batches, 2)
    good = Path(engine.save_checkpoint(root, "good", client_state={"epoch": 3}))
    engine.load_checkpoint(root, "victim")
    batches = iter(engine.training_dataloader)
    before = digest(engine)
    wrong, refused, taken = [], 0, 0
    for number, forgery in enumerate(some_forgeries(read_manifest(good), count, seed)):
        tag = f"forged{number}"
        if zcomm.group_rank() == 0:
            write_forged(good, tag, forgery.carried_out)
        zcomm.barrier()
        try:
            engine.load_checkpoint(root, tag)
            problem = after_success(engine)
            engine.load_checkpoint(root, "victim")
            batches = iter(engine.training_dataloader)
            taken += 1
        except Exception as error:
            problem = judged(error, forgery)
            refused += 1
        now = digest(engine)
        problem += "".join(f"; {name} changed" for name in before if now[name] != before[name])
        problems = zcomm.exchange(problem)
        if any(problems):
            wrong.append(f"{forgery}: {' | '.join(problems)}")
        if any("changed" in each for each in problems):
            engine.load_checkpoint(root, "victim")
            batches = iter(engine.training_dataloader)
    assert taken > 5 < refused
    seed_all(1)
    twin = KINDS[kind](stage)
    twin.load_checkpoint(root, "victim")
    zckpt.rng.restore(json.loads(before["random"]))
    ours = train(engine, batches, 2)
    zckpt.rng.restore(json.loads(before["random"]))
    if ours != train(twin, iter(twin.training_dataloader), 2):
        wrong.append("the steps that follow are not those of a run that never tried")
    return wrong


def judged(error: Exception, forgery: Forgery) -> str:
    """What is wrong with the refusal."""
    text = str(error)
    if isinstance(error, zckpt.CheckpointMismatch):  # another optimizer, schedule or model
        return "" if "checkpoint" in text else text
    if not isinstance(error, (zckpt.CheckpointStateError, zckpt.CheckpointCorrupt)):
        return f"{type(error).__name__}: {text}"
    lacks = [word for word in ("manifest.json", forgery.key) if word not in text]
    return f"{text} does not say {', '.join(lacks)}" if lacks else ""


def after_success(engine: Any) -> str:
    """What is wrong with an engine that took a forgery: rates, counters, and that it goes on."""
    rates = [float(rate) for rate in engine.get_lr()]
    if not all(0 <= rate < 1e301 for rate in rates):
        return f"rates {rates}"
    counters = engine.clock.state_dict()
    if any(value < 0 for name, value in counters.items() if name != "weight_exponent"):
        return f"counters {counters}"
    try:
        train(engine, iter(engine.training_dataloader), 1)
    except Exception as error:
        return f"taken, and then {type(error).__name__}: {error}"
    return ""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "world_size", "stage"), [("ours", 1, 1), ("torch", 1, 3), ("ours", 2, 3)])
def test_a_forged_value_is_taken_well_or_refused_by_name(
    tmp_path: Path, kind: str, world_size: int, stage: int
) -> None:
    count = COUNT // (world_size * 2 - 1)
    for problems in run_ranks(forge_and_load, world_size, str(tmp_path), kind, stage, count, 7, timeout_s=580):
        assert not problems, "\n".join([f"{len(problems)} forgeries:", *problems])
