"""The sections that look into a run, resolved."""

from __future__ import annotations

from typing import Any

import pytest

from zengine.config import ConfigError, Facts, Plan, load, resolve


def plan(**source: Any) -> Plan:
    return resolve(load({"train_batch_size": 8, **source}), Facts(world_size=2, replicas=2))


def test_the_plans_hold_what_the_sections_say() -> None:
    flops = {"enabled": True, "profile_step": 5, "module_depth": 2, "top_modules": 3, "detailed": False}
    found = plan(flops_profiler={**flops, "output_file": None}, profiler={"enabled": True, "ranks": [1]}).profiling
    assert {name: getattr(found.flops, name) for name in flops} == flops
    assert found.flops.output_file == ""
    assert found.window.ranks == (1,)
    assert not found.comms.enabled


def test_step_is_an_old_name_of_the_profiled_step() -> None:
    found = plan(flops_profiler={"enabled": True, "step": 5})
    assert found.profiling.flops.profile_step == 5
    assert 'dict: "flops_profiler.step" is an old name: read as "flops_profiler.profile_step"' in found.notices


def test_everything_is_off_by_default() -> None:
    found = plan().profiling
    assert (found.flops.enabled, found.window.enabled, found.comms.enabled) == (False, False, False)


def test_a_rank_that_records_is_one_of_the_run() -> None:
    with pytest.raises(ConfigError, match=r"profiler\.ranks.*ranks 0 to 1"):
        plan(profiler={"enabled": True, "ranks": [0, 2]})
    assert plan(profiler={"ranks": [2]}).profiling.window.ranks == (2,)  # off


def test_a_snapshot_without_cuda_is_replaced_and_said_so() -> None:
    (notice,) = [
        n for n in plan(profiler={"enabled": True, "memory_snapshot": True}).notices if "memory_snapshot" in n
    ]
    assert "every allocation of the CPU instead" in notice


def test_a_section_that_is_on_shows_its_values() -> None:
    text = plan(profiler={"enabled": True, "ranks": []}).describe()
    assert "profiler.ranks" in text
    assert "(all)" in text
    assert "flops_profiler.profile_step" not in text


def test_only_the_operations_that_are_named_are_counted() -> None:
    named = plan(comms_logger={"enabled": True, "prof_all": False, "prof_ops": ["all_reduce"]})
    assert named.profiling.comms.ops == named.telemetry.comms_ops == ("all_reduce",)
    everything = plan(comms_logger={"enabled": True, "prof_ops": ["all_reduce"]})
    assert everything.telemetry.comms_ops == ()
    assert any("prof_all is true" in notice for notice in everything.notices)


def test_counting_nothing_is_off_and_said_so() -> None:
    nothing = plan(comms_logger={"enabled": True, "prof_all": False})
    assert not nothing.telemetry.comms_log
    assert any("counts nothing" in notice for notice in nothing.notices)


def test_lines_that_are_not_written_need_no_labels() -> None:
    assert any(
        "comms_logger.debug" in notice for notice in plan(comms_logger={"enabled": True, "debug": True}).notices
    )
