"""Saved options and schedules of torch: accepted or rejected, without side effects."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import zoptim
from zengine.checkpoint.foreign_state import check_options, prepare_schedule, saved_options, set_options

INF, NAN = float("inf"), float("nan")


def adamw(kind: Any = torch.optim.AdamW, **options: Any) -> torch.optim.Optimizer:
    return kind([torch.nn.Parameter(torch.ones(3))], **{"lr": 0.1, **options})


@pytest.mark.parametrize("kind", [torch.optim.AdamW, zoptim.AdamW])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("lr", value) for value in ([], "x", None, -1.0, NAN, INF, True, {}, 10**400)),
        *(("betas", value) for value in ("x", (), (0.9,), (0.9, "x"), (0.9, 1.5), (0.9, -0.1), (0.9, 0.9, 0.9), 3)),
        *(("weight_decay", value) for value in ([0.1], -0.1, "0.1", NAN)),
        *(("eps", value) for value in (None, -1e-8)),
        ("weight_decay", torch.tensor([True])),
        *(("eps", value) for value in (torch.tensor(True), torch.ones(1, 1), torch.tensor(1), torch.tensor(1j))),
        *(("amsgrad", value) for value in ("yes", 3, [])),
        *(("foreach", value) for value in ("yes", 3, [])),
        ("params", []),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_name(kind: Any, key: str, value: Any) -> None:
    optimizer = adamw(kind)
    (options,) = saved_options(optimizer)
    with pytest.raises((ValueError, TypeError), match=rf"groups\[0\].*{key}"):
        check_options(optimizer, [{**options, key: value}], complete=True)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, zoptim.AdamW])
def test_options_of_another_run_are_taken(kind: Any) -> None:
    optimizer = adamw(kind, lr=0.5)
    theirs = saved_options(adamw(kind, lr=torch.tensor(0.25), betas=(0.5, 0.75), weight_decay=0))
    check_options(optimizer, [{**theirs[0], "initial_lr": 0.5, "of mine": "x"}], complete=True)
    set_options(optimizer, theirs)
    assert float(optimizer.param_groups[0]["lr"]) == 0.25
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.75)


def test_only_what_others_have_saved_may_be_incomplete() -> None:
    optimizer = adamw()
    check_options(optimizer, [{"lr": 0.5}], complete=False)
    with pytest.raises(ValueError, match=r"groups\[0\]\.betas is missing"):
        check_options(optimizer, [{"lr": 0.5}], complete=True)
    with pytest.raises(ValueError, match=r"groups\[0\]\.lr is missing"):
        check_options(optimizer, [{}], complete=False)


SCHEDULES: dict[str, Any] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4]),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.5**step),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=6),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


def advanced(make: Any, count: int) -> tuple[Any, torch.optim.Optimizer]:
    optimizer = adamw()
    schedule = make(optimizer)
    for step in range(count):
        optimizer.step()
        schedule.step(*([1.0 / (step - 1.5)] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else []))
    return schedule, optimizer


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("saved_at", "loaded_at"), [(0, 0), (5, 0), (0, 5), (3, 5), (6, 0)])
def test_a_schedule_of_torchs_takes_the_state_of_its_kind_at_any_step(
    name: str, saved_at: int, loaded_at: int
) -> None:
    count = min(saved_at, 5) if name == "OneCycleLR" else saved_at  # which has an end
    saved, _ = advanced(SCHEDULES[name], count)
    schedule, optimizer = advanced(SCHEDULES[name], loaded_at)
    before, rates = copy.deepcopy(schedule.state_dict()), optimizer.param_groups[0]["lr"]
    commit = prepare_schedule(schedule, optimizer, copy.deepcopy(saved.state_dict()))
    assert (plain(schedule), optimizer.param_groups[0]["lr"]) == (str(before), rates)
    commit()
    assert plain(schedule) == plain(saved)


def plain(schedule: Any) -> str:
    return str(schedule.state_dict())


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("junk", ["x", [], {}, NAN, -7, [[]]], ids=str)
def test_a_state_of_torchs_with_junk_is_refused_by_name_or_harmless(name: str, junk: Any) -> None:
    """Each value in turn: after a state that is taken the schedule steps."""
    saved, _ = advanced(SCHEDULES[name], 3)
    for key in saved.state_dict():
        schedule, optimizer = advanced(SCHEDULES[name], 1)
        before = plain(schedule)
        state = {**copy.deepcopy(saved.state_dict()), key: copy.deepcopy(junk)}
        try:
            commit = prepare_schedule(schedule, optimizer, state)
        except (TypeError, ValueError) as refusal:
            told = str(refusal).replace("_", " ")
            assert plain(schedule) == before
        else:
            commit()
            optimizer.step()
            schedule.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            assert optimizer.param_groups[0]["lr"] >= 0
            continue
        assert key.replace("_", " ") in told or "rates" in told


def test_a_rate_that_was_a_tensor_is_a_number_where_a_number_is() -> None:
    optimizer = adamw(lr=0.5)
    set_options(optimizer, [{"lr": torch.tensor(0.25)}])
    assert type(optimizer.param_groups[0]["lr"]) is float


def test_a_value_that_a_schedule_of_torchs_does_not_have_is_refused_but_for_flags_of_other_versions() -> None:
    optimizer = adamw()
    schedule = lr_scheduler.StepLR(optimizer, 2)
    with pytest.raises(ValueError, match="betas is not a value that a StepLR saves"):
        prepare_schedule(schedule, optimizer, {**schedule.state_dict(), "betas": 5})
    prepare_schedule(schedule, optimizer, {**schedule.state_dict(), "_of_another_version": False})()


@pytest.mark.parametrize("key", ["step", "optimizer", "get_lr"])
def test_a_value_that_would_hide_a_part_of_the_schedule_is_refused(key: str) -> None:
    schedule, optimizer = advanced(SCHEDULES["StepLR"], 1)
    with pytest.raises(ValueError, match=f"{key} is not a value that a StepLR saves"):
        prepare_schedule(schedule, optimizer, {**schedule.state_dict(), key: 5})


def test_a_schedule_of_the_callers_own_is_asked_by_loading() -> None:
    class Mine:
        def __init__(self) -> None:
            self.history = [1.0]

        def state_dict(self) -> dict[str, Any]:
            return {"history": self.history}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.history = [float(each) for each in state["history"]]
            optimizer.param_groups[0]["lr"] = self.history[-1]

        def get_last_lr(self) -> list[float]:
            return self.history[-1:]

    optimizer, schedule = adamw(), Mine()
    commit = prepare_schedule(schedule, optimizer, {"history": [1, 2, 3]})
    assert (schedule.history, optimizer.param_groups[0]["lr"]) == ([1.0], 0.1)
    commit()
    assert optimizer.param_groups[0]["lr"] == 3.0
    for wrong in ({}, {"history": "x"}, {"history": []}, {"history": [-1]}, {"history": [NAN]}):
        with pytest.raises((ValueError, LookupError)):
            prepare_schedule(schedule, optimizer, wrong)
        assert (schedule.history, optimizer.param_groups[0]["lr"]) == ([1.0, 2.0, 3.0], 3.0)
