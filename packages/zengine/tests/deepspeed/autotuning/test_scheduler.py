"""Experiments over hosts: slots, arguments, runs and results."""

from __future__ import annotations

import base64
import json
import shlex
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from zengine.deepspeed.autotuning import scheduler
from zengine.deepspeed.autotuning.autotuner import Autotuner, ResourceManager

MAPPINGS = [
    None,
    {},
    {"train_micro_batch_size_per_gpu": "--per_device_train_batch_size"},
    {"train_micro_batch_size_per_gpu ": " -mbs", "gradient_accumulation_steps": "--gas"},
]


@pytest.mark.parametrize("mappings", MAPPINGS)
def test_arg_mappings_are_stripped(mappings: dict[str, str] | None) -> None:
    hosts = "worker-0, worker-1"
    manager = ResourceManager(
        args=None, hosts=hosts, num_gpus_per_node=4, results_dir=None, exps_dir=None, arg_mappings=mappings
    )
    assert manager.arg_mappings == {key.strip(): option.strip() for key, option in (mappings or {}).items()}
    assert issubclass(Autotuner, object)


SCRIPT = """
import argparse, base64, json, sys
parser = argparse.ArgumentParser()
parser.add_argument("--deepspeed_config"), parser.add_argument("--batch", type=int)
given = parser.parse_args()
config = json.loads(base64.urlsafe_b64decode(given.deepspeed_config))
if given.batch == 3:
    sys.exit("Error: batch 3")
with open(config["autotuning"]["metric_path"], "w") as file:
    json.dump({"throughput": given.batch * 10}, file)
"""


def experiment(folder: Path, batch: int, slots: int = 1) -> str:
    config = {"train_micro_batch_size_per_gpu": batch, "autotuning": {"enabled": True}}
    path = folder / f"{batch}.json"
    exp: dict[str, Any] = {"name": f"mbs{batch}", "num_nodes": 1, "num_gpus": slots, "hostfile": "/none"}
    path.write_text(json.dumps({**exp, "ds_config": config}))
    return str(path)


def test_experiments_run_on_free_slots_and_the_best_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = tmp_path / "launcher.py"
    launcher.write_text("import runpy, sys; del sys.argv[:7]; runpy.run_path(sys.argv[0], run_name='__main__')")
    monkeypatch.setattr(scheduler, "_LAUNCHER", (sys.executable, str(launcher)))
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    options = ["--deepspeed_config", "ds.json", "--batch", "1"]
    args = Namespace(user_script=str(script), user_args=options, master_port=29700)
    mapping = {"train_micro_batch_size_per_gpu": "--batch"}
    manager = ResourceManager(args, ["localhost"], 2, str(tmp_path / "results"), str(tmp_path), mapping)
    paths = [experiment(tmp_path, batch) for batch in (2, 4, 3)]
    manager.schedule_experiments([*paths, paths[0]])
    assert [exp["exp_id"] for exp in manager.experiment_queue] == [0, 1, 2]
    manager.run()
    best, value = manager.parse_results("throughput")
    assert best is not None
    assert (best["name"], value, best["results"]) == ("mbs4", 40.0, {"throughput": 40})
    assert manager.finished_experiments[2][1] == "batch 3"
    assert manager.status() == "localhost (2 idle gpus)"
    folder = tmp_path / "results" / "mbs4"
    assert {path.name for path in folder.iterdir()} == {
        *("cmd.txt", "ds_config.json", "exp.json", "metrics.json", "stderr.log", "stdout.log")
    }
    line = shlex.split((folder / "cmd.txt").read_text())
    assert line[2:9] == ["--hostfile", "/none", "--include", "localhost:1", "--master_port", "29701", str(script)]
    ran = json.loads((folder / "exp.json").read_text())
    assert json.loads(base64.urlsafe_b64decode(ran["user_args"][1])) == best["ds_config"]

    manager.clear()
    manager.schedule_experiments(paths)  # results are on disk
    assert not manager.experiment_queue
    assert manager.parse_results("throughput")[1] == 40


def test_an_experiment_that_no_host_can_hold_is_an_error(tmp_path: Path) -> None:
    args = Namespace(user_script="train.py", user_args=[], master_port=29700)
    manager = ResourceManager(args, ["a", "b"], 2, str(tmp_path / "results"), str(tmp_path), {})
    manager.schedule_experiments([experiment(tmp_path, 1, slots=3)])
    with pytest.raises(ValueError, match=r"'mbs1' needs 1 hosts with 3 slots; there are a \(2 idle gpus\), b"):
        manager.run()
    assert manager.parse_results("throughput") == (None, None)
    manager.clear()
    manager.schedule_experiments([experiment(tmp_path, 1)])
    with pytest.raises(ValueError, match=r"have no config: pass --deepspeed_config FILE"):
        manager.run()
