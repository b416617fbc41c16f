"""A run killed between any two steps and resumed equals the uninterrupted run bit for bit.

The model has dropout, the data is shuffled over several epochs, the learning rate and the fp16 loss scale change.
Losses, norms, rates, scales and weights are compared, at every step, for every stage.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zckpt
import zcomm
import zengine
from zcomm.testing import run_ranks
from zengine.data import forever

NUM_STEPS = 7


class Net(nn.Module):
    """Dropout, batch statistics, a frozen layer: every kind of state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Dropout(0.3))
        self.frozen = nn.Linear(24, 24)
        self.frozen.requires_grad_(False)
        self.tail = nn.Linear(24, 1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        batch = batch.to(self.tail.weight.dtype)
        hidden = self.body(batch[:, :6])
        return (self.tail(self.frozen(hidden)).squeeze(1) - batch[:, 6]).square().mean()


def dataset() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    return list(torch.randn(26, 7, generator=generator))


# Shards every parameter at stage 3 and reshards between forward and backward.
STRICT = {"stage3_unit_size": 100, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}


def make(stage: int, section: str = "", accumulation: int = 2, shard_group_size: int = 0) -> Any:
    halves = {"": {}, "bf16": {"bf16": {"enabled": True}}}
    halves["fp16"] = {"fp16": {"enabled": True, "initial_scale_power": 5, "loss_scale_window": 2}}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.01}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": 20, "warmup_num_steps": 3, "warmup_type": "linear"},
        },
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 300,
            "shard_group_size": shard_group_size,
            **STRICT,
        },
        **halves[section],
    }
    engine, _, loader, _ = zengine.initialize(model=Net(), training_data=dataset(), config=config)
    return engine, loader


def run(engine: Any, loader: Any, until: int, root: str | None = None) -> list[tuple[Any, ...]]:
    """Train to step `until`; return each step's report. With `root`, save after each."""
    trace = []
    for batch in forever(loader):
        if engine.global_steps >= until:
            return trace
        engine.backward(engine(batch))
        report = engine.step()
        if report is not None:
            trace.append((report.step, report.loss, report.grad_norm, report.loss_scale, report.lr, report.samples))
            if root is not None:
                engine.save_checkpoint(root, client_state={"step": report.step})
    return trace


def weights(engine: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in engine.state_dict().items()}


def _resume_everywhere(root: str, stage: int, section: str) -> str:
    torch.manual_seed(100 + zcomm.group_rank())
    whole_engine, loader = make(stage, section)
    whole = run(whole_engine, loader, NUM_STEPS, root)
    final = weights(whole_engine)
    whole_engine.close()
    for done in range(1, NUM_STEPS):
        torch.manual_seed(77)  # random numbers differ until the checkpoint is loaded
        engine, loader = make(stage, section)
        _, client_state = engine.load_checkpoint(root, tag=f"global_step{done}")
        assert client_state == {"step": done}
        assert run(engine, loader, NUM_STEPS) == whole[done:], f"resumed after step {done}"
        for name, tensor in weights(engine).items():
            assert torch.equal(tensor, final[name]), f"{name} differs after resuming from step {done}"
        engine.close()
    return "the same"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_resumed_after_any_step_repeats_the_uninterrupted_one(tmp_path, world_size, stage):
    assert set(run_ranks(_resume_everywhere, world_size, str(tmp_path), stage, "")) == {"the same"}


@pytest.mark.parametrize("section", ["bf16", "fp16"])
def test_masters_and_the_moving_loss_scale_resume_bit_for_bit(tmp_path, section):
    assert set(run_ranks(_resume_everywhere, 2, str(tmp_path), 2, section)) == {"the same"}


def _save(root: str, stage: int, shard_group_size: int = 0) -> dict[str, torch.Tensor]:
    engine, loader = make(stage, accumulation=4 // zcomm.group_size(), shard_group_size=shard_group_size)
    run(engine, loader, 3)
    engine.save_checkpoint(root)
    return weights(engine)


def _load(root: str, stage: int, shard_group_size: int = 0) -> tuple[dict[str, torch.Tensor], list[int]]:
    engine, loader = make(stage, accumulation=4 // zcomm.group_size(), shard_group_size=shard_group_size)
    path, _ = engine.load_checkpoint(root)
    loaded = weights(engine)
    # saving again writes the same weights and optimizer state, byte for byte
    engine.save_checkpoint(f"{root}-again-{stage}-{zcomm.group_size()}", tag="again")
    if zcomm.group_rank() == 0:
        first = zckpt.find(root)
        second = zckpt.find(f"{root}-again-{stage}-{zcomm.group_size()}")
        assert first.names() == second.names()
        assert Path(path) == first.path
        for name in first.names():
            assert torch.equal(first.tensor(name), second.tensor(name)), name
    run(engine, loader, 5)
    return loaded, [engine.global_steps, engine.global_samples]


@pytest.mark.parametrize("saved", [(1, 0), (2, 2), (4, 1), (2, 3)], ids=str)
def test_any_world_size_and_stage_loads_the_checkpoint_of_any_other(tmp_path, saved):
    world_size, stage = saved
    root = str(tmp_path / "runs")
    expected = run_ranks(_save, world_size, root, stage)[0]
    for other_world, other_stage in ((1, 2), (2, 0), (2, 1), (4, 2), (4, 3)):
        for loaded, counters in run_ranks(_load, other_world, root, other_stage):
            assert all(torch.equal(loaded[name], expected[name]) for name in expected)
            assert counters == [5, 40]


@pytest.mark.parametrize("stage", [1, 3])
def test_hybrid_shard_groups_save_and_load_as_any_layout_does(tmp_path, stage):
    root, other = str(tmp_path / "hybrid"), str(tmp_path / "plain")
    for place, size, back in ((root, 2, 0), (other, 0, 2)):
        expected = run_ranks(_save, 4, place, stage, size)[0]
        for loaded, counters in run_ranks(_load, 4, place, stage, back):
            assert all(torch.equal(loaded[name], expected[name]) for name in expected)
            assert counters == [5, 40]


def test_weights_alone_can_be_loaded(tmp_path):
    root = str(tmp_path)
    engine, loader = make(2)
    run(engine, loader, 2)
    engine.save_checkpoint(root)
    fresh, _ = make(0)
    fresh.load_checkpoint(root, load_module_only=True)
    assert fresh.global_steps == 0
    assert fresh.optimizer.state == {}
    assert all(torch.equal(fresh.state_dict()[name], tensor) for name, tensor in weights(engine).items())
