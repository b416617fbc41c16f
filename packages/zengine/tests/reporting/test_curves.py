"""From events to curves."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from zengine.reporting import curves
from zengine.reporting.runs import Event, RecordedRun

TIME = "Train/Samples/elapsed_time_ms_"


def run_of(*values: dict[str, float], first: int = 1) -> RecordedRun:
    events = tuple(Event(step, step * 4, float(step), each) for step, each in enumerate(values, first))
    return RecordedRun(name="r", folder=Path("r"), events=events)


def test_a_step_is_parts_that_do_not_contain_each_other() -> None:
    timers = {"data": 1, "forward": 10, "backward": 20, "backward_inner": 15, "backward_allreduce": 7, "step": 4}
    parts = curves.step_parts({**timers, "checkpoint": 50}, 40)
    step = {"data": 1, "forward": 10, "backward": 15, "communication": 5, "step": 4}
    assert parts == {**step, "checkpoint": 50, "other": 5}


def test_timers_without_the_inner_one_take_the_wait_from_backward() -> None:
    assert curves.step_parts({"backward": 20, "backward_allreduce": 7}, 0)["backward"] == 13
    assert curves.step_parts({"backward": 5, "backward_allreduce": 7}, 0)["communication"] == 5


def test_parts_that_are_never_there_have_no_layer() -> None:
    tags = {f"{TIME}forward": 10.0, f"{TIME}backward": 20.0, f"{TIME}forward_microstep": 5.0, f"{TIME}data": 0.0}
    layers = curves.time_layers(run_of(tags, {**tags, "perf/step_time_ms": 35.0}))
    assert {line.name: [y for _, y in line.points] for line in layers} == {
        "forward": [10, 10],
        "backward": [20, 20],
        "other": [0, 5],
    }
    assert curves.time_layers(run_of({})) == []


def test_a_step_was_skipped_where_the_counter_rises() -> None:
    counts = [{"Train/Samples/skipped_steps": count} for count in (1.0, 1.0, 2.0, 3.0, 3.0)]
    assert curves.skipped_steps(run_of(*counts)) == [1, 3, 4]
    assert curves.skipped_steps(run_of(*counts, first=10)) == [12, 13]  # resumed: the first counts what was before


def test_owners_keep_what_was_last_known_and_the_rest_of_the_device_is_one() -> None:
    held = {"memory/parameters_bytes": 10.0, "memory/gathered_units_bytes": 0.0, "memory/cuda_bytes": 15.0}
    run = run_of(held, {"memory/cuda_bytes": 18.0}, {**held, "memory/parameters_bytes": 12.0})
    assert curves.memory_owners(run) == {
        "parameters": [(1, 10), (2, 10), (3, 12)],
        "activations and others": [(1, 5), (2, 8), (3, 3)],
    }
    assert curves.memory_owners(run_of({"memory/process_bytes": 5.0, "Memory/after_step_bytes": 5.0})) == {}


def test_the_peak_is_the_devices_if_there_is_one() -> None:
    process = {"memory/process_peak_bytes": 9.0}
    assert curves.peak_bytes(run_of(process)) == 9
    assert curves.peak_bytes(run_of({**process, "memory/cuda_peak_bytes": 4.0})) == 4
    assert curves.peak_bytes(run_of({})) == 0


@pytest.mark.parametrize(("most", "unit"), [(3 * 2**30, "GiB"), (2**20, "MiB"), (2000, "KiB"), (5, "bytes")])
def test_bytes_have_a_readable_unit(most: float, unit: str) -> None:
    factor, found = curves.bytes_unit(most)
    assert found == unit
    assert 1 <= most * factor < 1024


@pytest.mark.parametrize(("most", "unit"), [(2e3, "PFLOPS"), (5, "TFLOPS"), (0.5, "GFLOPS"), (1e-5, "MFLOPS")])
def test_rates_have_a_readable_unit(most: float, unit: str) -> None:
    assert curves.flops_unit(most)[1] == unit


def test_a_typical_value_is_the_median_of_what_is_finite() -> None:
    assert curves.typical([(1, 1.0), (2, math.nan), (3, 5.0), (4, 3.0)]) == 3
    assert math.isnan(curves.typical([]))


def test_old_tags_and_new_ones_draw_the_same_charts() -> None:
    old = {"Train/Samples/train_loss": 2.0, "Train/Samples/lr": 0.1, "Train/Samples/grad_norm": 1.0}
    new = {"train/loss": 2.0, "train/learning_rate": 0.1, "train/grad_norm": 1.0}
    drawn = ["".join(curves.charts(run_of(values, values))) for values in (old, new)]
    assert drawn[0] == drawn[1]
    assert drawn[0].count("<figure") == 3


def test_a_scale_that_never_moves_is_not_drawn() -> None:
    still, moving = ({"Train/Samples/loss_scale": value} for value in (8.0, 4.0))
    assert "".join(curves.charts(run_of(still, still))) == ""
    assert "Loss scale" in "".join(curves.charts(run_of(still, moving)))


def test_each_tag_of_rollouts_has_a_chart() -> None:
    values = [{"rollout/mean_length": 5.0, "rollout/reward": -0.5, "train/loss": 1.0}, {"rollout/mean_length": 7.0}]
    length, reward = curves.rollout_charts(run_of(*values))
    assert "Rollouts: mean length" in length
    assert "new tokens per sample" in length
    assert "Rollouts: reward" in reward
    assert [title for title in map(str, curves.charts(run_of(*values))) if "Rollouts: " in title] == [length, reward]
    assert list(curves.rollout_charts(run_of({"train/loss": 1.0}))) == []
