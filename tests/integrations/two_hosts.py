"""Program of each rank of test_two_hosts.py, and of the one process that it is compared with.

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
RUNS: dict[str, dict[str, Any]] = {
    "stage 2": {"zero_optimization": {"stage": 2, "reduce_bucket_size": 1000}},
    "stage 3, weights again inside a host": {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}},
    "stage 1 between hosts, layers split inside": {
        "zero_optimization": {"stage": 1},
        "tensor_parallel": {"autotp_size": 2},
    },
}


def model() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))
    made.tp_plan = {"0": "colwise", "2": "rowwise"}
    return made


def engine_of(run: str) -> zengine.Engine:
    config = {"train_batch_size": BATCH, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    given = config if zcomm.group_size() == 1 else {**config, **RUNS[run]}
    engine = zengine.initialize(model=model(), config=given)[0]
    split = given.get("tensor_parallel", {}).get("autotp_size", 1)
    assert (
        engine.dp_world_size * split == zcomm.group_size()
    )  # otherwise a split without effect would have the same curves
    return engine


def trained(run: str, folder: Path) -> list[float]:
    """Train, resume a checkpoint in a new engine half-way, and return losses and norms."""
    told: list[float] = []
    engine = engine_of(run)
    for step in range(STEPS):
        if step == STEPS // 2:
            engine.save_checkpoint(folder / run, "half")
            engine.close()
            engine = engine_of(run)
            engine.load_checkpoint(folder / run, "half")
        data = torch.randn(BATCH, 12, generator=torch.Generator().manual_seed(step)).chunk(engine.dp_world_size)
        mine = data[zcomm.group_rank() * len(data) // zcomm.group_size()]
        engine.backward(engine(mine).square().mean())
        report = engine.step()
        told += [report.loss, report.grad_norm]
    engine.save_checkpoint(folder / run, "end")
    engine.close()
    return told


def weights(run: str, folder: Path) -> list[torch.Tensor]:
    """Return the final weights, from a checkpoint of any number of ranks."""
    engine = engine_of(run)
    engine.load_checkpoint(folder / run, "end")
    return list(engine.state_dict().values())


def main(folder: Path) -> None:
    with zcomm.init(device="cpu") as world:
        found: dict[str, Any] = {run: trained(run, folder) for run in RUNS}
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
