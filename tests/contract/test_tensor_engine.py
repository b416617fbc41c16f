"""zengine over a tensor-parallel module: losses are those of whole replicas, and its checkpoints load into those."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import zcomm
import zengine
from zcomm.testing import end_ranks, run_ranks
from zpartition.tensor import parallelize, tp_model_init
from zpartition.tensor.testing import PLAN, Language

STEPS = 3


def config(stage: int) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
    }


def engine_of(stage: int, mesh: DeviceMesh, *, is_split: bool) -> zengine.Engine:
    """Over the replicas of `mesh`; each of two tensor ranks, or a rank alone."""
    if stage and is_split:  # the model says which ranks are replicas
        model = tp_model_init(Language(), 2, config=PLAN)
        return zengine.initialize(model=model, config=config(stage))[0]
    model = Language()
    if is_split:
        parallelize(model, PLAN, zcomm.axis_group(mesh, "tensor"))
    return zengine.initialize(model=model, config=config(stage), mesh=mesh["shard"])[0]


def train(engine: zengine.Engine, replica: int, first: int) -> list[float]:
    """Losses of this replica."""
    losses = []
    for step in range(first, first + STEPS):
        for micro in range(2):
            seed = 100 * step + 10 * micro + replica
            loss = engine(torch.randint(0, 29, (2, 8), generator=torch.Generator().manual_seed(seed)))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
    losses.append(float(engine.get_global_grad_norm() or 0.0))
    return losses


def _run(root: Path) -> dict[str, list[list[float]]]:
    """[split, whole] of a few stages; the whole ones go on from the checkpoint of the split ones."""
    mesh = zcomm.make_mesh(shard=2, tensor=2)
    replica = zcomm.axis_rank(mesh, "shard")
    found = {}
    for stage in (0, 3):
        split = engine_of(stage, mesh, is_split=True)
        first = train(split, replica, 0)
        split.save_checkpoint(str(root / str(stage)), "split")
        after = train(split, replica, STEPS)
        split.close()
        whole = engine_of(stage, mesh, is_split=False)
        found[f"stage {stage}"] = [first, train(whole, replica, 0)]
        whole.load_checkpoint(str(root / str(stage)), "split")
        found[f"stage {stage}, resumed"] = [after, train(whole, replica, STEPS)]
        whole.close()
    return found


def test_an_engine_trains_and_saves_a_split_model(tmp_path: Path) -> None:
    try:
        for found in run_ranks(_run, 4, tmp_path, timeout_s=240):
            for what, (ours, expected) in found.items():
                assert ours == pytest.approx(expected, abs=2e-5), what  # float32, as the engine has it
    finally:
        end_ranks()  # torch keeps meshes for ever
