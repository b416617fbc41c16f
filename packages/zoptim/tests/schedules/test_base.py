from __future__ import annotations

from typing import Any

import pytest
import torch

import zoptim
from zoptim import LRRangeTest, OneCycle, Schedule, WarmupCosineLR, WarmupDecayLR, WarmupLR

MAKERS = {
    "Schedule": Schedule,
    "WarmupLR": lambda o: WarmupLR(o, 0.01, 0.1, 5),
    "WarmupDecayLR": lambda o: WarmupDecayLR(o, 12, 0.01, 0.1, 5, "linear"),
    "WarmupCosineLR": lambda o: WarmupCosineLR(o, 12, 0.1, 5, exact_peak=True),
    "OneCycle": lambda o: OneCycle(o, 0.01, 0.1, 0.5, 3, decay_step_size=2, decay_mom_rate=0.01),
    "LRRangeTest": lambda o: LRRangeTest(o, 0.01, 3),
}
pytestmark = pytest.mark.filterwarnings("ignore:OneCycle sets betas")
every = pytest.mark.parametrize("name", MAKERS)


def make_optimizer(*lrs: Any) -> torch.optim.Optimizer:
    groups = [{"params": [torch.ones(2, requires_grad=True)], "lr": lr} for lr in lrs or (0.02, 0.5)]
    return zoptim.AdamW(groups)


def in_optimizer(optimizer: torch.optim.Optimizer) -> list[tuple[float, float]]:
    return [(float(group["lr"]), group["betas"][0]) for group in optimizer.param_groups]


@every
def test_the_optimizer_has_the_laws_value_at_the_count(name: str) -> None:
    optimizer = make_optimizer()
    schedule = MAKERS[name](optimizer)
    for t in range(-1, 15):
        assert schedule.last_batch_iteration == t
        assert [lr for lr, _ in in_optimizer(optimizer)] == schedule.lrs(t) == schedule.get_lr()
        assert schedule.get_last_lr() == schedule.get_lr()
        schedule.step()


@every
def test_loading_a_count_equals_stepping_to_it(name: str) -> None:
    stepped = make_optimizer()
    schedule = MAKERS[name](stepped)
    for _ in range(14):
        schedule.step()
        state = schedule.state_dict()
        assert state == {"last_batch_iteration": schedule.last_batch_iteration}
        resumed = make_optimizer()
        MAKERS[name](resumed).load_state_dict(state)
        assert in_optimizer(resumed) == in_optimizer(stepped)


@every
def test_optimizer_and_schedule_may_be_restored_in_any_order(name: str) -> None:
    optimizer = make_optimizer()
    schedule = MAKERS[name](optimizer)
    for _ in range(7):
        schedule.step()
    saved = optimizer.state_dict(), schedule.state_dict()
    expected = in_optimizer(optimizer)
    for order in ("optimizer first", "schedule first", "schedule built late"):
        other = make_optimizer(0.02, 0.5)
        if order == "schedule built late":
            other.load_state_dict(saved[0])
            rebuilt = MAKERS[name](other)
            rebuilt.load_state_dict(saved[1])
        else:
            rebuilt = MAKERS[name](other)
            for part in "os" if order == "optimizer first" else "so":
                other.load_state_dict(saved[0]) if part == "o" else rebuilt.load_state_dict(saved[1])
        assert in_optimizer(other) == expected, order
        rebuilt.step()
        assert [lr for lr, _ in in_optimizer(other)] == schedule.lrs(7), order


def test_stepping_to_a_given_count_jumps() -> None:
    schedule = MAKERS["WarmupLR"](make_optimizer())
    schedule.step(3)
    assert schedule.last_batch_iteration == 3
    assert schedule.get_lr() == schedule.lrs(3)


def test_a_start_count_is_set_at_once() -> None:
    optimizer = make_optimizer()
    schedule = WarmupLR(optimizer, 0.0, 0.1, 4, "linear", 1)
    assert in_optimizer(optimizer)[0][0] == pytest.approx(0.025)
    assert schedule.last_batch_iteration == 1


def test_a_tensor_lr_is_filled_in_place() -> None:
    lr = torch.tensor(0.5, dtype=torch.float64)
    optimizer = make_optimizer(lr)
    schedule = LRRangeTest(optimizer, 0.01, 1)
    schedule.step()
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == pytest.approx(0.02)


def test_the_base_keeps_each_groups_own_rate() -> None:
    optimizer = make_optimizer(0.1, 0.2)
    schedule = Schedule(optimizer)
    schedule.step()
    assert [lr for lr, _ in in_optimizer(optimizer)] == [0.1, 0.2]


def test_state_of_something_else_raises() -> None:
    schedule = MAKERS["WarmupLR"](make_optimizer())
    with pytest.raises(ValueError, match="state of a WarmupLR needs last_batch_iteration; it has last_epoch"):
        schedule.load_state_dict({"last_epoch": 3})
    with pytest.raises(ValueError, match="last_batch_iteration is -2; it must be a whole number >= -1"):
        schedule.load_state_dict({"last_batch_iteration": -2})


def test_a_group_added_later_raises_with_what_to_do() -> None:
    optimizer = make_optimizer(0.1)
    schedule = MAKERS["WarmupLR"](optimizer)
    optimizer.add_param_group({"params": [torch.ones(2, requires_grad=True)]})
    with pytest.raises(ValueError, match="built for 1 parameter groups, the optimizer now has 2"):
        schedule.step()


def test_anything_but_an_optimizer_raises() -> None:
    for make in MAKERS.values():
        with pytest.raises(TypeError, match=r"optimizer is a dict; it must be a torch\.optim\.Optimizer"):
            make({})


@every
def test_any_torch_optimizer_is_driven(name: str) -> None:
    optimizer = torch.optim.Adam([torch.ones(2, requires_grad=True)], lr=0.3)
    schedule = MAKERS[name](optimizer)
    schedule.step()
    assert [optimizer.param_groups[0]["lr"]] == schedule.get_lr()


@every
@pytest.mark.parametrize("junk", [None, "x", -7, 1.5, [], float("nan"), float("inf"), 2**60, 10**400], ids=str)
def test_an_impossible_count_raises_and_a_valid_one_is_prepared(name: str, junk: Any) -> None:
    optimizer = make_optimizer()
    schedule = MAKERS[name](optimizer)
    rates = [group["lr"] for group in optimizer.param_groups]
    with pytest.raises((TypeError, ValueError), match="last_batch_iteration"):
        schedule.prepare_load({"last_batch_iteration": junk})
    with pytest.raises(ValueError, match="last_batch_iteration"):
        schedule.prepare_load(junk)
    commit = schedule.prepare_load({"last_batch_iteration": 4})
    assert (schedule.last_batch_iteration, [group["lr"] for group in optimizer.param_groups]) == (-1, rates)
    commit()
    assert (schedule.last_batch_iteration, schedule.get_lr()) == (4, schedule.lrs(4))
