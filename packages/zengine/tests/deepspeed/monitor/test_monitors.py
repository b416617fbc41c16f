"""The monitors one by one, made from their section as DeepSpeed's suite makes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from zengine.deepspeed.monitor.base import Monitor
from zengine.deepspeed.monitor.comet import CometMonitor
from zengine.deepspeed.monitor.config import DeepSpeedMonitorConfig, TensorBoardConfig, get_monitor_config
from zengine.deepspeed.monitor.csv_monitor import csvMonitor
from zengine.deepspeed.monitor.monitor import MonitorMaster
from zengine.deepspeed.monitor.tensorboard import TensorBoardMonitor
from zengine.deepspeed.monitor.wandb import WandbMonitor
from zengine.deepspeed.runtime.config import DeepSpeedConfig
from zengine.telemetry import MissingPackageError


def test_a_monitor_has_the_keys_of_its_section(tmp_path: Path):
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "test"}
    monitor = csvMonitor(get_monitor_config({"csv_monitor": section}).csv_monitor)
    assert (monitor.enabled, monitor.output_path, monitor.job_name) == (True, str(tmp_path), "test")
    monitor.write_events([("Train/loss", 0.5, 8)])
    monitor.close()
    assert (tmp_path / "test" / "Train_loss.csv").read_text().split() == ["step,loss", "8,0.5"]
    wandb = {"enabled": False, "group": "g", "team": "t", "project": "p"}
    found = WandbMonitor(get_monitor_config({"wandb": wandb}).wandb)
    assert (found.enabled, found.group, found.team, found.project) == (False, "g", "t", "p")


def test_an_empty_section_has_the_defaults():
    defaults = DeepSpeedMonitorConfig()
    board = TensorBoardMonitor(get_monitor_config({"tensorboard": {}}).tensorboard)
    assert (board.enabled, board.output_path, board.job_name) == (False, "", "DeepSpeedJobName")
    assert board.job_name == defaults.tensorboard.job_name == TensorBoardConfig().job_name
    assert WandbMonitor(defaults.wandb).project == "deepspeed"
    assert CometMonitor(defaults.comet).samples_log_interval == 100
    board.write_events([("a", 1.0, 1)])  # to nowhere
    with pytest.raises(AttributeError, match="colour"):
        board.colour  # noqa: B018


def test_sections_are_read_from_dicts_and_arguments():
    """The defaults are DeepSpeed 0.19.8's."""
    made = DeepSpeedMonitorConfig(wandb={"enabled": True, "group": "g"}, comet={"api_key": "secret"})
    assert made.enabled
    assert (made.wandb.group, made.wandb.team, made.tensorboard.enabled) == ("g", None, False)
    assert (made.comet.mode, made.comet.samples_log_interval) == (None, 100)
    assert "secret" not in repr(made)
    assert not get_monitor_config({"train_batch_size": "other keys are not checked"}).enabled
    assert TensorBoardConfig(job_name="mine").job_name == "mine"
    assert DeepSpeedConfig({"train_batch_size": 1, "wandb": {"group": "g"}}).monitor_config.wandb.group == "g"
    for wrong in ({"tensorboard": {"enable": True}}, {"tensor_board": {}}):
        with pytest.raises(ValueError, match="Did you mean"):
            DeepSpeedMonitorConfig(**wrong)


def test_the_master_has_them_all(tmp_path: Path):
    master = MonitorMaster({"csv_monitor": {"enabled": True, "output_path": str(tmp_path)}})
    assert (master.csv_monitor.enabled, master.tb_monitor.enabled) == (True, False)
    assert all(isinstance(each, Monitor) for each in (master, master.wandb_monitor, master.comet_monitor))
    master.close()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("zengine.telemetry.sinks.table.is_installed", lambda name: False)
    with pytest.raises(MissingPackageError, match="comet"):
        CometMonitor(get_monitor_config({"comet": {"enabled": True}}).comet)
