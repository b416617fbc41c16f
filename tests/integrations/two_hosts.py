"""What each rank of test_two_hosts.py runs, and the one process that it is compared with.

two_hosts.py FOLDER      under torchrun, or alone; writes FOLDER/rank<N>-of-<W>.json
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zcomm
import zengine

STEPS, BATCH = 4, 8


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))


def trained(world: zcomm.World, stage: int, folder: Path) -> dict[str, Any]:
    """Losses, norms and weights; half of the way a checkpoint is saved, and a new engine goes on from it."""
    config = {
        "train_batch_size": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000},
    }
    told: list[float] = []
    engine = zengine.initialize(model=model(), config=config)[0]
    for step in range(STEPS):
        if step == STEPS // 2:
            engine.save_checkpoint(folder / f"stage{stage}-of-{world.world_size}", "half")
            engine.close()
            engine = zengine.initialize(model=model(), config=config)[0]
            engine.load_checkpoint(folder / f"stage{stage}-of-{world.world_size}", "half")
        data = torch.randn(BATCH, 12, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(data.chunk(world.world_size)[world.rank]).square().mean())
        report = engine.step()
        told += [report.loss, report.grad_norm]
    state = engine.state_dict()
    engine.close()
    return {"told": told, "weights": {name: value.flatten().tolist() for name, value in state.items()}}


def main(folder: Path) -> None:
    with zcomm.init(device="cpu") as world:
        found: dict[str, Any] = {f"stage {stage}": trained(world, stage, folder) for stage in (2, 3)}
        tensor = torch.full((5,), float(world.rank))
        zcomm.all_reduce(tensor)
        found |= {
            "transport": zcomm.transport(),
            "reason": zcomm.transport_reason(),
            "sum": tensor.tolist(),
            "place": [world.rank, world.local_rank, world.launch.local_world_size, os.getpid()],
        }
        (folder / f"rank{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
