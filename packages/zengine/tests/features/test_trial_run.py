"""Runs that a tuner starts: they write what fits or what a step takes, and end on all ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zengine
from zcomm.testing import run_ranks
from zengine.features.trial_run import batch_maker
from zengine.planning.activations import copy_without_memory

WIDTH, SAMPLES = 16, 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.tail = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.body.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.tail(self.body(x).relu()).square().mean() * scale


class ReadsValues(Net):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x if x.sum().item() > 0 else -x, scale)


def _train(stage: int, section: dict[str, Any], num_steps: int = 4, model: type[Net] = Net) -> tuple[int, Any]:
    """Return the steps that were trained, and the status of the exit."""
    engine, *_ = zengine.initialize(
        model=model(),
        config={
            "train_micro_batch_size_per_gpu": SAMPLES,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            "zero_optimization": {"stage": stage},
            "autotuning": {"enabled": True, **section},
        },
    )
    status: Any = None
    try:
        for _ in range(2 * num_steps):
            engine.backward(engine(torch.ones(SAMPLES, WIDTH, device=engine.device), scale=2.0))
            engine.step()
    except SystemExit as end:
        status = end.code
    steps = engine.clock.steps
    engine.close()
    return steps, status


@pytest.mark.parametrize("stage", [0, 3])
def test_the_first_forward_writes_what_fits_at_each_stage(tmp_path: Path, stage: int) -> None:
    path = tmp_path / "new" / "model.json"
    assert run_ranks(_train, 2, stage, {"model_info_path": str(path)}) == [(0, 0), (0, 0)]
    found = json.loads(path.read_text())
    numel = WIDTH * WIDTH + WIDTH + WIDTH + 1
    assert (found["num_params"], found["trainable_num_params"]) == (numel, numel - WIDTH)
    assert [row["stage"] for row in found["stages"]] == [0, 1, 2, 3]
    assert all(row["largest_micro_batch"] > SAMPLES for row in found["stages"])
    sent = {row["stage"]: row["sent_bytes"] for row in found["stages"]}
    assert sent[0][0] == sent[0][1] > 0  # reduced once a step
    assert sent[2][1] > sent[2][0]
    assert found["replicas"] == 2


def test_a_model_that_reads_values_has_a_reason_in_place_of_stages(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    assert _train(0, {"model_info_path": str(path)}, model=ReadsValues) == (0, 0)
    found = json.loads(path.read_text())
    assert "stages" not in found
    assert "CannotDryRun" in found["reason"]
    assert found["num_params"] > 0


@pytest.mark.parametrize("stage", [0, 3])
def test_profiled_steps_are_timed_and_the_run_ends(tmp_path: Path, stage: int) -> None:
    path = tmp_path / "metrics.json"
    section = {"metric_path": str(path), "start_profile_step": 1, "end_profile_step": 3}
    assert run_ranks(_train, 2, stage, section) == [(3, 0), (3, 0)]
    found = json.loads(path.read_text())
    assert found["num_steps"] == 2
    assert 0 < found["forward"] + found["backward"] + found["step"] <= found["latency"] * 1.001
    assert found["throughput"] == pytest.approx(2 * 2 * SAMPLES / found["latency"] * 1e3)
    assert found["FLOPS_per_gpu"] > 0


def test_at_least_one_step_is_profiled(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    section = {"metric_path": str(path), "start_profile_step": 2, "end_profile_step": 1}
    assert _train(0, section) == (3, 0)
    assert json.loads(path.read_text())["num_steps"] == 1
    section = {"metric_path": str(path), "start_profile_step": 0, "end_profile_step": 1}
    assert _train(0, section) == (2, 0)  # FLOPs are counted in the first one
    assert json.loads(path.read_text())["FLOPS_per_gpu"] > 0


def test_without_a_path_the_section_has_no_effect_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert _train(0, {}, num_steps=7) == (7, None)
    assert "autotuning.enabled has no effect here: `deepspeed --autotuning tune`" in caplog.text


def test_batches_of_other_sizes_keep_what_has_no_samples() -> None:
    x, table = torch.zeros(4, 3, dtype=torch.int64), torch.zeros(7, 2)
    positional = batch_maker(Net(), (x, 0.5), {}, 4)(9)
    assert (positional[0].shape, positional[0].dtype, positional[1]) == ((9, 3), torch.int64, 0.5)
    named = batch_maker(Net(), (), {"x": x, "table": table, "n": torch.tensor(1)}, 4)(2)
    assert {key: tuple(value.shape) for key, value in named.items()} == {"x": (2, 3), "table": (7, 2), "n": ()}
    both = batch_maker(Net(), (x,), {"scale": 3.0}, 4)(1)
    assert (tuple(both["x"].shape), both["scale"]) == ((1, 3), 3.0)
    assert batch_maker(Net(), (x,), {}, 8)(2)[0].shape == (2, 3)  # another size than the config's: the common one


class TakesMore(Net):
    def forward(self, x: torch.Tensor, scale: float = 1.0, **more: torch.Tensor) -> torch.Tensor:
        return super().forward(x, scale)


def test_keywords_beside_positional_arguments_stay_keywords() -> None:
    x = torch.zeros(4, 3)
    found = batch_maker(TakesMore(), (x,), {"labels": x}, 4)(2)
    assert {name: tuple(value.shape) for name, value in found.items()} == {"x": (2, 3), "labels": (2, 3)}


def test_a_copy_without_memory_shares_what_was_shared() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    copied: Any = copy_without_memory(model.eval(), "meta")
    assert copied[0].weight is copied[1].weight
    assert copied[0].weight.device.type == "meta"
    assert copied.training
    assert model[0].weight.device.type == "cpu"
    assert not model.training
