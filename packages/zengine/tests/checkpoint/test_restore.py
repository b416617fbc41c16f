"""Restore from disk, and from the in-memory copy of a background save."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zckpt
import zengine
import zpartition
from zcomm.testing import run_ranks
from zengine.checkpoint.restore import RestoredState, RestoreScope
from zpartition import Shard, safe_get_full_fp32_param

BATCH = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}


def engine_of(stage: int, *, behind: bool = True, scaled: bool = False, **zero: Any) -> Any:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(30, 30), nn.Dropout(0.3), nn.Linear(30, 1))
    config = {
        **BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20, **zero},
        "checkpoint": {"async_save": behind},
        "fp16": {"enabled": scaled, "initial_scale_power": 4, "loss_scale_window": 1},
    }
    data = [torch.full((30,), float(n)).sin() for n in range(64)]
    return zengine.initialize(model=model, config=config, training_data=data)


def steps(engine: Any, batches: Any, count: int) -> list[float]:
    losses = []
    while len(losses) < count:
        batch = next(batches).to(next(engine.parameters()).dtype)
        loss = engine(batch).float().square().mean()
        engine.backward(loss)
        if engine.step() is not None:
            losses.append(loss.item())
    return losses


def goes_back(directory: str, stage: int, scaled: bool, zero: dict[str, Any]) -> None:
    engine, optimizer, loader, _ = engine_of(stage, scaled=scaled, **zero)
    with pytest.raises(ValueError, match=r"needs an earlier save_checkpoint\(\)"):
        engine.restore_from_memory()
    steps(engine, iter(loader), 2)
    engine.save_checkpoint(directory, "a", client_state={"note": 5})
    expected = steps(engine, iter(loader), 3)
    with torch.no_grad():
        for param in engine.parameters():
            param.fill_(float("nan"))
    optimizer.param_groups[0]["lr"] = 7.0
    for _ in range(2):  # as often as one likes, before the disk has it and after
        assert engine.restore_from_memory() == {"note": 5}
        assert (engine.global_steps, engine.current_loss_scale > 1) == (2, scaled)
        assert steps(engine, iter(loader), 3) == expected
        engine.wait_for_checkpoint()
    engine.close()


@pytest.mark.parametrize(
    ("stage", "scaled", "disk"),
    [(0, False, False), (2, True, False), (3, False, False), (3, False, True)],
    ids=["stage 0", "stage 2, fp16", "stage 3", "stage 3, states on disk"],
)
def test_a_step_that_went_wrong_is_undone_from_memory(stage: int, scaled: bool, disk: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        on_disk = {"offload_optimizer": {"device": "nvme", "nvme_path": directory}} if disk else {}
        run_ranks(goes_back, 2, directory, stage, scaled, on_disk)


def test_without_background_saves_there_is_no_copy_and_the_error_says_what_to_do() -> None:
    engine = engine_of(1, behind=False)[0]
    with pytest.raises(ValueError, match=r'"checkpoint": \{"async_save": true\}, or use load_checkpoint\(\)'):
        engine.restore_from_memory()
    engine.close()


def test_a_position_that_does_not_fit_is_refused_before_anything_changes(tmp_path) -> None:
    saved, *_ = engine_of(1, behind=False)
    steps(saved, iter(saved.training_dataloader), 2)
    saved.save_checkpoint(str(tmp_path))
    data = [torch.full((30,), float(n)) for n in range(48)]
    config = {**BATCH, "optimizer": {"type": "AdamW", "params": {"lr": 0.5}}}
    model = nn.Sequential(nn.Linear(30, 30), nn.Dropout(0.3), nn.Linear(30, 1))
    engine, _, loader, _ = zengine.initialize(model=model, config=config, training_data=data)
    before = {name: value.clone() for name, value in engine.state_dict().items()}
    batches = iter(loader)
    next(batches)
    with pytest.raises(ValueError, match="dataset of 64 samples, this one has 48"):
        engine.load_checkpoint(str(tmp_path), load_lr_scheduler_states=False)
    torch.testing.assert_close(engine.state_dict(), before, rtol=0, atol=0)
    assert (engine.global_steps, engine.get_lr()) == (0, [0.5])
    next(batches)  # the iteration goes on


def test_what_to_restore_follows_from_the_arguments():
    assert RestoreScope.choose(False, True, True) == RestoreScope(optimizer=True, scheduler=True, run=True)
    assert RestoreScope.choose(True, True, True) == RestoreScope(optimizer=False, scheduler=False, run=False)
    assert RestoreScope.choose(False, False, True) == RestoreScope(optimizer=False, scheduler=True, run=True)


@pytest.mark.parametrize("value", [-7.0, float("nan"), float("inf")])
def test_a_step_count_that_is_none_is_refused(value: float) -> None:
    restored = RestoredState()
    restored.add("optimizer.step.a", Shard("optimizer.step.a", (), (), (0, 1), torch.zeros(1)))
    restored.numbers[0].tensor.fill_(value)
    with pytest.raises(zckpt.CheckpointStateError, match=r"optimizer\.step\.a = .* is not a step count of 0 or more"):
        restored.stage_numbers()


def masters_after_loading(directory: str, stage: int, zero: dict[str, Any]) -> tuple[list[bool], list[torch.dtype]]:
    """Whether the masters that were loaded are the saved ones, the rounded ones, and those that the weights show."""

    def engine_with(**more: Any) -> Any:
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 1))
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20, **zero, **more},
        }
        return zengine.initialize(model=model, config=config)[0]

    def masters(engine: Any) -> list[torch.Tensor]:
        return [safe_get_full_fp32_param(param).clone() for param in engine.module.parameters()]

    saved, loaded = engine_with(), engine_with(load_from_fp32_weights=False)
    saved.backward(saved(torch.ones(2, 30, dtype=torch.bfloat16)).float().square().mean())
    saved.step()
    saved.save_checkpoint(directory, "a")
    loaded.load_checkpoint(directory, "a")
    exact = engine_with(load_from_fp32_weights=1)
    exact.load_checkpoint(directory, "a")
    old, new = masters(saved), masters(loaded)
    is_kept = [torch.equal(a, b) for a, b in zip(old, masters(exact))]
    is_rounded = [torch.equal(a.bfloat16().float(), b) and not torch.equal(a, b) for a, b in zip(old, new)]
    weights = [zpartition.whole_state_dict(engine.module) for engine in (saved, loaded)]
    is_shown = [torch.equal(weights[0][name], weights[1][name]) for name in weights[0]]
    return [*is_kept, *is_rounded, *is_shown], [tensor.dtype for tensor in new]


@pytest.mark.parametrize(("stage", "disk"), [(0, False), (1, False), (2, True), (3, False), (3, True)])
def test_masters_are_rounded_to_the_weights_if_asked_for(stage: int, disk: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        zero = {"offload_optimizer": {"device": "nvme", "nvme_path": directory}} if disk else {}
        for found, dtypes in run_ranks(masters_after_loading, 2, f"{directory}/save", stage, zero):
            assert all(found)
            assert set(dtypes) == {torch.float32}


def summed_otherwise(directory: str) -> list[str]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    engine = engine_of(1, reduce_at="micro_step")[0]
    engine.save_checkpoint(directory, "a")
    engine.wait_for_checkpoint()
    engine.close()
    logging.getLogger("zengine").addHandler(handler)
    for zero in ({"reduce_at": "micro_step"}, {}):
        again = engine_of(1, **zero)[0]
        again.load_checkpoint(directory, "a")
        again.close()
    logging.getLogger("zengine").removeHandler(handler)
    return [message for message in told if "reduce_at" in message]


def test_a_run_whose_gradients_are_summed_in_another_order_from_now_on_is_told_so(tmp_path: Path) -> None:
    first, second = run_ranks(summed_otherwise, 2, str(tmp_path))
    assert (len(first), second) == (1, [])
    assert "trained with zero_optimization.reduce_at = micro_step, this engine has boundary" in first[0]
