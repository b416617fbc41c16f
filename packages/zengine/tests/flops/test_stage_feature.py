"""`flops_profiler` in a pipeline: the stages together count what one process counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import zcomm
import zengine
from zcomm.testing import run_ranks
from zpartition.pipeline import LayerSpec, PipelineModule

WIDTH, MICRO = 8, 4


def layers() -> list[Any]:
    return [*(LayerSpec(nn.Linear, WIDTH, WIDTH), torch.tanh) * 5, LayerSpec(nn.Linear, WIDTH, 1)]


def batches(count: int = MICRO) -> Any:
    return iter([(torch.ones(2, WIDTH), torch.zeros(2, 1))] * count)


def profiled(folder: Path, stage: int, per_rank: int, schedule: str) -> list[float]:
    torch.manual_seed(0)
    model = PipelineModule(
        layers(), num_stages=2, stages_per_rank=per_rank, loss_fn=nn.functional.mse_loss, partition_method="uniform"
    )
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        "pipeline": {"schedule": schedule},
        "flops_profiler": {"enabled": bool(folder.name), "profile_step": 1, "output_file": str(folder / "table.txt")},
        "jsonl_monitor": {"enabled": True, "output_path": str(folder), "job_name": "run"},
    }
    with zengine.initialize(model=model, config=config)[0] as engine:
        losses = [engine.train_batch(batches()).item()]
        assert not (folder / "table.txt").exists()
        engine.eval_batch(batches())  # between two steps, and not counted
        losses.append(engine.train_batch(batches()).item())
        if zcomm.group_rank() == 0:
            assert (folder / "table.txt").exists()
        assert engine.pipeline.passes is engine._passes
        return [*losses, engine.train_batch(batches()).item()]


def alone() -> tuple[int, int]:
    """FLOPs of a forward, and of a backward."""
    model = nn.Sequential(*[each.build() for each in layers() if isinstance(each, LayerSpec)])
    inputs, labels = next(batches())
    with FlopCounterMode(display=False) as forward:
        loss = nn.functional.mse_loss(model(inputs), labels)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize(
    ("world", "stage", "per_rank", "schedule"), [(2, 0, 1, "zero_bubble"), (4, 3, 1, "1f1b"), (2, 1, 2, "1f1b")]
)
def test_stages_count_together_what_one_process_does(
    tmp_path: Path, world: int, stage: int, per_rank: int, schedule: str
) -> None:
    losses = run_ranks(profiled, world, tmp_path, stage, per_rank, schedule)
    found = json.loads((tmp_path / "run" / "flops.json").read_text())
    forward, backward = alone()
    assert found["step"] == 1
    assert found["modules"][0]["flops"] == forward
    assert found["modules"][0]["params"] == 5 * (WIDTH * WIDTH + WIDTH) + WIDTH + 1
    assert found["backward_flops"] == backward
    assert [row["flops"] for row in found["stages"]] != [forward, 0]
    assert sum(row["flops"] for row in found["stages"]) == forward
    paths = [row["path"] for row in found["modules"]]
    assert sorted(paths) == sorted(["", "layers", *(f"layers.{index}" for index in range(0, 11, 2))])
    text = (tmp_path / "table.txt").read_text()
    assert "PipelineModule after step 1" in text
    assert "\n  1   " in text
    assert losses[0] == pytest.approx(sorted(losses[0], reverse=True))
