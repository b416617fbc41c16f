"""Every world size and stage loads every other's checkpoint: masters, weights and optimizer state, bit for bit.

zckpt's tests count the bytes read.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zckpt
import zcomm
import zengine
import zpartition
from zcomm.testing import run_ranks

WORLDS, STAGES = (1, 2, 4), (0, 1, 2, 3)


class Net(nn.Module):
    """Sizes that no world size divides; a frozen layer, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm = nn.Linear(7, 37), nn.BatchNorm1d(37)
        self.frozen = nn.Linear(37, 11).requires_grad_(False)
        self.last = nn.Linear(11, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.frozen(self.norm(self.first(x)))).float().square().mean()


def engine_at(stage: int) -> Any:
    zero = {"stage": stage, "stage3_unit_size": 100, "stage3_param_persistence_threshold": 0}
    config = {
        "train_micro_batch_size_per_gpu": 4 // zcomm.group_size() * 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "zero_optimization": {**zero, "reduce_bucket_size": 300},
    }
    return zengine.initialize(model=Net(), config=config)[0]


def train(engine: Any) -> None:
    rows = 8 // zcomm.group_size()
    for step in range(2):
        data = torch.randn(8, 7, generator=torch.Generator().manual_seed(step)).bfloat16()
        engine.backward(engine(data[zcomm.group_rank() * rows :][:rows]))
        engine.step()


def held(engine: Any) -> list[tuple[str, Any]]:
    """Return all of this rank's values by their names in a checkpoint."""
    partition = engine.parts.partition
    found = [(f"model.{shard.name}", shard) for shard in partition.shards()]
    states = zpartition.state_shards(engine.optimizer, partition.holders)
    return found + [(f"optimizer.{key}.{shard.name}", shard) for key, shard in states]


def save_all(root: str) -> None:
    for stage in STAGES:
        engine = engine_at(stage)
        train(engine)
        engine.save_checkpoint(root, f"{zcomm.group_size()}-{stage}")
        engine.close()


def load_all(root: str) -> list[str]:
    """Return the values that differ: saved by, loaded at, name."""
    wrong = []
    sources = {}
    for world_size, stage in itertools.product(WORLDS, STAGES):
        checkpoint = zckpt.find(root, f"{world_size}-{stage}")
        sources[checkpoint.tag] = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    for stage in STAGES:
        engine = engine_at(stage)
        for tag, source in sources.items():
            engine.load_checkpoint(root, tag)
            seen = set()
            for name, shard in held(engine):
                seen.add(name)
                expected = source[name].flatten()[slice(*shard.span)]
                if not torch.equal(shard.tensor.flatten(), expected.flatten()):
                    wrong.append(f"{tag} at {zcomm.group_size()}-{stage}: {name}")
            for name, weight in engine.state_dict().items():
                if not torch.equal(weight, source[f"model.{name}"].to(weight.dtype)):
                    wrong.append(f"{tag} at {zcomm.group_size()}-{stage}: weights of {name}")
            if zcomm.group_size() == 1 and seen != set(source):
                wrong.append(f"{tag} at 1-{stage}: only {sorted(seen)}")
        engine.close()
    return wrong


def test_all_pairs_of_world_sizes_and_stages(tmp_path: Path) -> None:
    for world_size in WORLDS:
        run_ranks(save_all, world_size, str(tmp_path))
    for world_size in WORLDS:
        assert run_ranks(load_all, world_size, str(tmp_path)) == [[]] * world_size
