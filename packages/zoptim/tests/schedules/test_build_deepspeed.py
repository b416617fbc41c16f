"""Every schedule against DeepSpeed 0.19.8, from construction on, by the table of deepspeed_tables.py."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import zoptim
from zoptim import OneCycle, Schedule

TABLES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("deepspeed_tables.json").read_text())
each = pytest.mark.parametrize("table", TABLES, ids=lambda t: f"{t['name']} {t['params']}")
NEAR = {"rel": 1e-7, "abs": 1e-12}


def make(table: dict[str, Any], **more: Any) -> tuple[torch.optim.Optimizer, Schedule]:
    optimizer = zoptim.AdamW([{"params": [torch.ones(2, requires_grad=True)], "lr": lr} for lr in table["own"]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # tested elsewhere
        made: Any = zoptim.make_schedule(table["name"], optimizer, {**table["params"], **more})
    return optimizer, made


def in_optimizer(optimizer: torch.optim.Optimizer) -> tuple[list[float], list[float]]:
    groups = optimizer.param_groups
    return [group["lr"] for group in groups], [beta for group in groups for beta in group["betas"]]


def wanted(table: dict[str, Any], step: int) -> tuple[Any, Any]:
    """Each group's lr and betas after a number of steps; 0 is after construction."""
    firsts = table["beta1"][step if len(table["beta1"]) > 1 else 0]
    flat = [beta for first in firsts for beta in (first, table["beta2"])]
    return pytest.approx(table["lr"][step], **NEAR), pytest.approx(flat, **NEAR)


def test_the_table_has_every_schedule() -> None:
    names = [table["name"] for table in TABLES]
    assert set(names) == {"WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"}
    assert len(names) > 100


@each
def test_every_step_has_deepspeeds_rate_and_momenta(table: dict[str, Any]) -> None:
    optimizer, schedule = make(table)
    for step in range(len(table["lr"])):
        lrs, betas = in_optimizer(optimizer)
        rate, momenta = wanted(table, step)
        assert lrs == rate, f"after {step} steps"
        assert betas == momenta, f"after {step} steps"
        schedule.step()


@each
def test_get_lr_and_get_mom_return_deepspeeds_values(table: dict[str, Any]) -> None:
    """Before the first step get_mom returns the law's value, which DeepSpeed does not set in the optimizer."""
    optimizer, schedule = make(table)
    assert schedule.get_lr() == pytest.approx(table["get_lr"], **NEAR)
    momenta = schedule.get_mom() if isinstance(schedule, OneCycle) else None
    if table["get_mom"] is None:
        assert momenta is None
    else:
        assert momenta is not None
        assert [list(pair) for pair in momenta] == [pytest.approx(pair, **NEAR) for pair in table["get_mom"]]
    for _ in range(len(table["lr"]) - 1):
        schedule.step()
        lrs, betas = in_optimizer(optimizer)
        assert schedule.get_lr() == schedule.get_last_lr() == lrs
        if table["get_mom"] is not None and isinstance(schedule, OneCycle):
            assert [beta for pair in schedule.get_mom() or () for beta in pair] == betas


@each
def test_a_jump_a_resume_and_a_start_count_lead_to_the_same_step(table: dict[str, Any]) -> None:
    for step in (1, 4, 9, 13):
        jumped, first = make(table)
        first.step(step - 1)
        loaded, second = make(table)
        second.load_state_dict(first.state_dict())
        started, third = make(table, last_batch_iteration=step - 1)
        for optimizer in (jumped, loaded, started):
            assert in_optimizer(optimizer) == wanted(table, step)
        for schedule in (first, second, third):
            schedule.step()
        for optimizer in (jumped, loaded, started):
            assert in_optimizer(optimizer) == wanted(table, step + 1)


@each
def test_a_jump_back_to_before_the_first_step_is_as_in_deepspeed(table: dict[str, Any]) -> None:
    """DeepSpeed's step(-1) sets the results of get_lr and get_mom."""
    optimizer, schedule = make(table)
    schedule.step(5)
    schedule.step(-1)
    assert in_optimizer(optimizer)[0] == pytest.approx(table["get_lr"], **NEAR)
    assert schedule.get_lr() == pytest.approx(table["get_lr"], **NEAR)
