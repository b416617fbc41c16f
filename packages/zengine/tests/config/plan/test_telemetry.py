"""What is measured and where it goes, from the keys of a config."""

from __future__ import annotations

from typing import Any

import pytest

from zengine.config import ConfigError, Facts, Plan, load, resolve


def plan(**source: Any) -> Plan:
    return resolve(load({"train_batch_size": 2, **source}), Facts(world_size=2, replicas=2))


def test_nothing_is_wanted_by_default_and_every_place_and_breakdown_is_a_wish() -> None:
    assert not plan().telemetry.is_wanted
    sections = ("tensorboard", "csv_monitor", "jsonl_monitor", "comms_logger")
    sections += ("wandb", "comet", "mlflow", "aim", "trackio")
    wishes: list[dict[str, Any]] = [{section: {"enabled": True}} for section in sections]
    wishes += [{key: 1} for key in ("steps_per_print", "bench_steps")]
    wishes += [{key: True} for key in ("wall_clock_breakdown", "memory_breakdown")]
    for wish in wishes:
        assert plan(**wish).telemetry.is_wanted, wish


def test_every_key_of_the_rates_arrives() -> None:
    given = {
        "warmup_steps": 5, "tokens_per_sample": 128, "num_layers": 2, "hidden_size": 64, "recomputation": True,
        "peak_tflops": 100, "count_flops_at": 3,
    }  # fmt: skip
    rates = plan(timers={"throughput": given}).telemetry.rates
    assert {name: getattr(rates, name) for name in given} == {**given, "recomputation": "yes"}
    assert plan(timers={"throughput": {"recomputation": False}}).telemetry.rates.recomputation == "no"


def test_bench_steps_measure_even_where_throughput_is_switched_off() -> None:
    off = {"throughput": {"enabled": False}}
    assert not plan(timers=off).telemetry.throughput
    assert plan(timers=off, bench_steps=3).telemetry.throughput


def test_keys_of_a_speed_that_is_told_nowhere_are_told() -> None:
    timers = {"throughput": {"enabled": True, "count_flops_at": 5}}
    (said,) = [notice for notice in plan(timers=timers).notices if "timers" in notice]
    assert "timers.throughput.count_flops_at has no effect here: no output shows the throughput" in said
    assert not [notice for notice in plan(timers=timers, steps_per_print=1).notices if "timers" in notice]


def test_histograms_need_the_place_they_are_written_to() -> None:
    assert plan(tensorboard={"enabled": True, "gradient_histograms": 10}).telemetry.gradient_histograms == 10
    assert plan(tensorboard={"enabled": False, "gradient_histograms": 10}).telemetry.gradient_histograms == 0


def test_comets_keys_arrive_and_its_secret_is_shown_nowhere() -> None:
    given = {
        "enabled": True, "samples_log_interval": 7, "project": "p", "workspace": "w", "api_key": "secret-1",
        "experiment_name": "n", "experiment_key": "k", "online": False, "mode": "create",
    }  # fmt: skip
    found = plan(comet=given)
    assert {name: getattr(found.telemetry.comet, name) for name in given} == given
    assert "secret-1" not in found.describe()
    assert "secret-1" not in repr(found.telemetry)
    with pytest.raises(ConfigError, match=r'comet\.mode.*must be one of "get", "create", "get_or_create"'):
        plan(comet={"enabled": True, "mode": "new"})


def test_the_keys_of_other_services_arrive() -> None:
    given: dict[str, dict[str, Any]] = {
        "mlflow": {
            "enabled": True, "samples_log_interval": 7, "tracking_uri": "u", "experiment": "e", "run_name": "n",
            "run_id": "i",
        },
        "aim": {"enabled": True, "repo": "r", "experiment": "e", "run_name": "n", "run_hash": "h"},
        "trackio": {"enabled": True, "project": "p", "group": "g", "run_name": "n", "space_id": "s"},
    }  # fmt: skip
    found = plan(**given).telemetry
    for section, keys in given.items():
        assert {name: getattr(getattr(found, section), name) for name in keys} == keys


def test_the_plan_keeps_the_config_as_it_was_given() -> None:
    assert plan(jsonl_monitor={"enabled": True}).given == {
        "train_batch_size": 2,
        "jsonl_monitor": {"enabled": True},
    }
