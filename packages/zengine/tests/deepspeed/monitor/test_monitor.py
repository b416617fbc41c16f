"""A script's own events, in the monitors of a config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zcomm.testing import run_ranks
from zengine.deepspeed.monitor.monitor import MonitorMaster
from zengine.deepspeed.runtime.config import DeepSpeedConfig


def config_of(folder: Path | str) -> dict[str, object]:
    csv = {"enabled": True, "output_path": str(folder), "job_name": "mine"}
    return {"csv_monitor": csv, "zero_optimization": {"stage": 2}}


def test_events_are_written_by_tag_and_sample(tmp_path: Path):
    monitor = MonitorMaster(config_of(tmp_path))
    assert monitor.enabled
    monitor.write_events([("Eval/loss", 0.5, 10), ("Eval/accuracy", 0.9, 10)])
    monitor.write_events([("Eval/loss", 0.25, 20)])
    monitor.close()
    lines = (tmp_path / "mine" / "Eval_loss.csv").read_text().split()
    assert lines == ["step,loss", "10,0.5", "20,0.25"]
    assert (tmp_path / "mine" / "Eval_accuracy.csv").exists()


def test_the_monitors_of_a_deepspeed_config_are_taken(tmp_path: Path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 4, **config_of(tmp_path)}))
    ds_config = DeepSpeedConfig(str(path))
    monitor = MonitorMaster(ds_config.monitor_config)
    assert monitor.enabled
    monitor.write_events([("Time per step", 0.5, 10)])
    monitor.close()
    (written,) = (tmp_path / "mine").glob("*.csv")
    assert written.read_text().split()[-1] == "10,0.5"


def write_from_all(folder: str) -> None:
    monitor = MonitorMaster(config_of(folder))
    monitor.write_events([("Eval/loss", 0.5, 10)])
    monitor.close()


def test_rank_0_alone_writes(tmp_path: Path):
    run_ranks(write_from_all, 2, str(tmp_path))
    assert (tmp_path / "mine" / "Eval_loss.csv").read_text().split() == ["step,loss", "10,0.5"]


def test_nothing_enabled_is_said_and_mistakes_are_errors():
    assert not MonitorMaster({}).enabled
    with pytest.raises(ValueError, match=r"[dD]id you mean"):
        MonitorMaster({"csv_monitor": {"enable": True}})
