"""ZenFlow in the engine: AdamW where every step updates everything, and checkpoints in the middle of intervals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zckpt
import zcomm
import zengine
import zpartition
from zcomm.testing import run_ranks
from zpartition.selective import SelectiveUpdates

WIDTH, ACCUMULATION = 24, 2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FIXED = {"topk_ratio": 0.2, "select_strategy": "step", "select_interval": 6, "update_interval": 3}


def engine_of(zenflow: dict[str, Any] | None, stage: int = 2, **more: Any) -> zengine.DeepSpeedEngine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
    zero: dict[str, Any] = {
        "stage": stage,
        "offload_optimizer": {"device": "cpu"},
        "reduce_bucket_size": 700,
        "stage3_param_persistence_threshold": 0,
    }
    if zenflow is not None:
        zero["zenflow"] = zenflow
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 0.3,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 0.01}},
        "zero_optimization": zero,
        **more,
    }
    return zengine.initialize(model=model, config=config)[0]


def train(engine: zengine.DeepSpeedEngine, steps: range) -> list[float]:
    losses = []
    dtype = next(engine.module.parameters()).dtype
    for step in steps:
        for micro in range(ACCUMULATION):
            generator = torch.Generator().manual_seed(1000 * step + 10 * micro + zcomm.group_rank())
            x = torch.randn(2, WIDTH, generator=generator) * torch.logspace(-1, 1, WIDTH).roll(step // 4)
            loss = engine(x.to(engine.device, dtype)).float().square().mean()
            engine.backward(loss)
            losses.append(loss.item())
            engine.step()
    return losses


def weights_of(engine: zengine.DeepSpeedEngine) -> dict[str, torch.Tensor]:
    found = {name: value.cpu().clone() for name, value in zpartition.whole_state_dict(engine.module).items()}
    for name, param in engine.module.named_parameters():
        found[f"master.{name}"] = zpartition.safe_get_full_fp32_param(param).cpu()
        found[f"exp_avg_sq.{name}"] = zpartition.safe_get_full_optimizer_state(param, "exp_avg_sq").cpu()
    return found


def run(zenflow: dict[str, Any] | None, stage: int, steps: int, more: dict[str, Any]) -> tuple[list[float], Any]:
    engine = engine_of(zenflow, stage, **more)
    found = train(engine, range(steps)), weights_of(engine)
    engine.close()
    return found


BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
EVERY_STEP = [
    {"topk_ratio": 0.3, "update_interval": 1, "select_strategy": "step", "select_interval": 3},
    {"topk_ratio": 1.0, "update_interval": 1},
    {"topk_ratio": 1.0, "update_interval": 4, "offload": True},
]


@pytest.mark.parametrize("more", [{}, BF16, FP16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("zenflow", EVERY_STEP)
def test_where_every_step_updates_everything_the_bits_are_those_of_offloaded_adamw(
    zenflow: dict[str, Any], stage: int, more: dict[str, Any]
) -> None:
    expected = run_ranks(run, 2, None, stage, 7, more)
    for (plain_losses, plain), (losses, weights) in zip(expected, run_ranks(run, 2, zenflow, stage, 7, more)):
        assert losses == plain_losses
        assert [name for name in plain if not torch.equal(plain[name], weights[name])] == []


def resume(folder: str, zenflow: dict[str, Any], stage: int, more: dict[str, Any]) -> list[str]:
    """Return what differs between a run and one that goes on from its checkpoint, after each of 9 steps."""
    wrong: list[str] = []
    unsaved = engine_of(zenflow, stage, **more)
    expected = train(unsaved, range(12))
    unsaved.close()
    for at in (1, 4, 5, 6, 8, 9):
        first = engine_of(zenflow, stage, **more)
        train(first, range(at))
        first.save_checkpoint(folder, tag=f"at{at}")
        if train(first, range(at, 12)) != expected[ACCUMULATION * at :]:
            wrong.append(f"a save at {at} changes the run")
        second = engine_of(zenflow, stage, **more)
        train(second, range(2))  # a state of its own, to be replaced
        second.load_checkpoint(folder, tag=f"at{at}")
        if train(second, range(at, 12)) != expected[ACCUMULATION * at :]:
            wrong.append(f"resumed at {at}")
        one, other = weights_of(first), weights_of(second)
        wrong += [f"{name} after {at}" for name in one if not torch.equal(one[name], other[name])]
        first.close()
        second.close()
    return wrong


@pytest.mark.parametrize(
    ("zenflow", "stage", "more"),
    [
        (FIXED, 2, {}),
        ({**FIXED, "overlap_step": True, "full_warm_up_rounds": 2}, 2, BF16),
        ({**FIXED, "overlap_step": True, "offload": True}, 3, {}),
        ({"topk_ratio": 0.2, "auto_ratio": 0.5}, 1, {}),
    ],
    ids=["fixed", "overlap bf16", "overlap stage 3", "auto"],
)
def test_a_run_resumes_bit_for_bit_in_the_middle_of_an_interval(
    tmp_path: Path, zenflow: dict[str, Any], stage: int, more: dict[str, Any]
) -> None:
    for wrong in run_ranks(resume, 2, str(tmp_path), zenflow, stage, more):
        assert wrong == []


def save_at(folder: str, steps: int) -> list[float]:
    engine = engine_of(FIXED)
    train(engine, range(steps))
    engine.save_checkpoint(folder, tag="t")
    selected = {name: columns.tolist() for name, columns in updates_of(engine).selection.columns.items()}
    engine.close()
    return [sum(map(sum, selected.values()))]


def updates_of(engine: zengine.DeepSpeedEngine) -> SelectiveUpdates:
    updates = engine.parts.partition.updates
    assert isinstance(updates, SelectiveUpdates)
    return updates


def load_at(folder: str, zenflow: dict[str, Any] | None) -> tuple[list[float], int, dict[str, torch.Tensor]]:
    engine = engine_of(zenflow)
    engine.load_checkpoint(folder, tag="t")
    pending = 0
    if zenflow is not None:
        updates = updates_of(engine)
        pending = updates.num_pending
        selected = [float(sum(map(sum, (columns.tolist() for columns in updates.selection.columns.values()))))]
    else:
        selected = []
    found = weights_of(engine)
    engine.close()
    return selected, pending, found


def test_another_world_and_a_run_without_zenflow_take_the_checkpoint(tmp_path: Path) -> None:
    (saved, _) = run_ranks(save_at, 2, str(tmp_path), 5)
    ((selected, pending, weights),) = run_ranks(load_at, 1, str(tmp_path), FIXED)
    assert (selected, pending) == (saved, 2)
    ((_, _, plain),) = run_ranks(load_at, 1, str(tmp_path), None)
    for name, value in plain.items():
        assert torch.equal(value, weights[name]), name


def edited(overlap: bool) -> bool:
    """An edit of one bias, while an update is not shown, keeps that update."""
    engine = engine_of({**FIXED, "overlap_step": overlap})
    train(engine, range(4))  # the rest was updated after the third step
    first = engine.module[0]
    before = zpartition.safe_get_full_fp32_param(first.weight).clone()
    with zpartition.gathered([first.bias], modifier_rank=0), torch.no_grad():
        first.bias.fill_(0.5)
    after = zpartition.safe_get_full_fp32_param(first.weight)
    found = torch.equal(before, after) and torch.equal(zpartition.safe_get_full_fp32_param(first.bias), first.bias)
    train(engine, range(4, 8))
    engine.close()
    return bool(found)


@pytest.mark.parametrize("overlap", [False, True])
def test_edits_of_weights_keep_updates_that_are_not_shown(overlap: bool) -> None:
    assert all(run_ranks(edited, 2, overlap))


def test_gradients_that_are_pending_when_other_intervals_select_update_the_rest_first(tmp_path: Path) -> None:
    engine = engine_of(FIXED)
    train(engine, range(5))
    assert updates_of(engine).num_pending == 2
    engine.save_checkpoint(str(tmp_path), tag="t")
    engine.close()
    engine = engine_of({**FIXED, "select_interval": 5, "update_interval": 5})
    engine.load_checkpoint(str(tmp_path), tag="t")
    updates = updates_of(engine)
    before = updates.state_dict()["selected"]
    train(engine, range(5, 6))
    assert updates.state_dict()["selected"] != before
    assert updates.num_pending == 1
    assert updates._num_updates() == {2}  # one of the first three steps, one of the two that were pending
    engine.close()


@pytest.mark.parametrize(("key", "value"), [("unshown", None), ("magnitudes", {"other": [0.0, 0.0]}), ("steps", -1)])
def test_a_damaged_state_is_refused_before_anything_is_loaded(key: str, value: object) -> None:
    engine = engine_of(FIXED)
    train(engine, range(4))
    updates = updates_of(engine)
    state = updates.state_dict()
    with pytest.raises(ValueError, match=key):
        updates.check_state({**state, key: value})
    updates.check_state(state)
    engine.close()


def test_a_load_that_fails_leaves_the_weights_that_are_shown(tmp_path: Path) -> None:
    engine = engine_of({**FIXED, "overlap_step": True}, 2)
    train(engine, range(3))
    assert updates_of(engine).state_dict()["unshown"]
    engine.save_checkpoint(tmp_path, "damaged")
    file = next((tmp_path / "damaged").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)
    train(engine, range(3, 5))
    before = [param.detach().clone() for param in engine.module.parameters()]
    with pytest.raises(zckpt.CheckpointCorrupt):
        engine.load_checkpoint(tmp_path, "damaged")
    engine.parts.partition.publish()
    after = list(engine.module.parameters())
    engine.close()
    assert all(((now - then).abs() < 0.1).all() for now, then in zip(after, before))
    assert all((now != 0).any() for now in after)


def ledgers(zenflow: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    engine = engine_of(zenflow)
    train(engine, range(4))
    found = engine.parts.partition.ledger()
    planned = zpartition.plan(
        engine.module,
        policy=engine.parts.partition.policy,
        world_size=2,
        optimizer=torch.optim.AdamW,
        num_backwards=2,
        device=DEVICE,
    ).ledger()
    engine.close()
    return found, planned


@pytest.mark.parametrize("zenflow", [FIXED, {**FIXED, "overlap_step": True}])
def test_the_plan_bounds_the_memory(zenflow: dict[str, Any]) -> None:
    (first, planned), (second, _) = run_ranks(ledgers, 2, zenflow)
    name = "pinned pending gradients" if DEVICE == "cuda" else "host pending gradients"
    assert first[name] == second[name] == planned[name]
    most = max(first["columns"], second["columns"])
    assert 0 < most <= planned["columns"] <= 1.2 * most


def with_states_away(stage: int) -> tuple[list[float], list[float]]:
    """Train with states that leave the device for a while, an update of the rest under way, and without."""
    found = []
    for leaves in (False, True):
        engine = engine_of({**FIXED, "overlap_step": True}, stage)
        losses = train(engine, range(4))
        if leaves:
            engine.offload_states()
            engine.reload_states()
        found.append(losses + train(engine, range(4, 9)))
        engine.close()
    return found[0], found[1]


@pytest.mark.parametrize("stage", [2, 3])
def test_states_may_leave_the_device_between_steps(stage: int) -> None:
    for stayed, left in run_ranks(with_states_away, 2, stage):
        assert stayed == left


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.skipped = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, skips: bool) -> torch.Tensor:
        return self.used(x) if skips else self.skipped(self.used(x))


def skip(warm_up: int) -> list[float]:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.0}},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu"},
            "zenflow": {**FIXED, "full_warm_up_rounds": warm_up},
        },
    }
    engine = zengine.initialize(model=Skipping(), config=config)[0]
    losses = []
    for step in range(8):
        loss = engine(torch.full((2, WIDTH), 0.1 * step, device=engine.device), step % 2 == 1).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    moved = zpartition.safe_get_full_fp32_param(engine.module.skipped.weight)
    engine.close()
    return [*losses, float(moved.sum())]


@pytest.mark.parametrize("warm_up", [0, 3])
def test_parameters_that_steps_skip_have_the_gradient_zero_there(warm_up: int) -> None:
    first, second = run_ranks(skip, 2, warm_up)
    assert first == second
    assert all(map(math.isfinite, first))


def epochs(num_samples: int, zenflow: dict[str, Any]) -> int:
    data = [torch.zeros(WIDTH) for _ in range(num_samples)]
    model = nn.Linear(WIDTH, WIDTH)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}, "zenflow": zenflow},
    }
    engine = zengine.initialize(model=model, config=config, training_data=data)[0]
    every = engine.parts.partition.policy.offload.selective.select_every
    engine.close()
    return every


def test_epochs_are_those_of_the_training_data() -> None:
    assert run_ranks(epochs, 1, 40, {}) == [10]
    assert run_ranks(epochs, 1, 40, {"select_strategy": "epoch", "select_interval": 3}) == [30]
    assert run_ranks(epochs, 1, 40, {"steps_per_epoch": 7}) == [7]
    with pytest.raises(ValueError, match=r"11 steps are more .* \(training_data has 10 steps in an epoch\)"):
        epochs(40, {"update_interval": 11})


def test_a_step_with_a_nan_changes_nothing() -> None:
    engine = engine_of(FIXED, 1)
    train(engine, range(2))
    before = updates_of(engine).state_dict()
    for _ in range(ACCUMULATION):
        engine.backward(engine(torch.full((2, WIDTH), torch.nan, device=engine.device)).square().mean())
        engine.step()
    assert updates_of(engine).state_dict() == before
    train(engine, range(2, 6))
    engine.close()


def test_unfreezing_and_other_optimizers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"carry Adam's moments .* optimizer is SGD"):
        zengine.initialize(
            model=nn.Linear(4, 4),
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
            config={
                "train_batch_size": 1,
                "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}, "zenflow": {}},
            },
        )
    with pytest.raises(ValueError, match=r"AdamW has amsgrad=True"):
        zengine.initialize(
            model=nn.Linear(4, 4),
            optimizer=lambda p: torch.optim.AdamW(p, amsgrad=True),
            config={
                "train_batch_size": 1,
                "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}, "zenflow": {}},
            },
        )
