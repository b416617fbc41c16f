"""Ranks of one host: their environment and commands, and a real start by the command `deepspeed`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zengine import as_deepspeed
from zengine.deepspeed.launcher import launch, runner

WORLD = {"worker-0": [0, 1], "worker-1": [2]}
SCRIPT = """
import argparse, json, os, sys
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--prompt")
args = parser.parse_args()
import importlib.util
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "LOCAL_SIZE")
found = {name: os.environ[name] for name in names}
found |= {"local_rank": args.local_rank, "prompt": args.prompt}
found["is_ours"] = "zengine" in importlib.util.find_spec("deepspeed").origin
print(json.dumps(found), flush=True)
sys.exit(3 if args.prompt == "fail" and args.local_rank == 1 else 0)
"""


def parsed(*options: str) -> launch.argparse.Namespace:
    info = f"--world_info={runner.encode_world_info(WORLD)}"
    return launch.parse_args([info, *options, "train.py", "--epochs", "3"])


def test_environments_of_the_ranks_of_a_host():
    found = launch.rank_environments(WORLD, parsed("--node_rank=1", "--master_addr=worker-0"), {"HOME": "/root"})
    assert len(found) == 1
    expected = {
        "RANK": "2",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "3",
        "LOCAL_SIZE": "1",
        "CROSS_RANK": "1",
        "HOME": "/root",
    }
    assert expected.items() <= found[0].items()
    bound = launch.rank_environments(WORLD, parsed("--bind_cores_to_rank", "--bind_core_list=0-3"), {})
    assert [each["OMP_NUM_THREADS"] for each in bound] == ["2", "2"]


def test_commands_of_the_ranks():
    ours = [sys.executable, "-u", "-m", "zengine.as_deepspeed"]
    assert launch.rank_command(parsed(), 1) == [*ours, "train.py", "--local_rank=1", "--epochs", "3"]
    assert launch.rank_command(parsed("--module", "--no_local_rank"), 1) == [*ours, "-m", "train.py", "--epochs", "3"]
    assert launch.rank_command(parsed("--no_python"), 0) == ["train.py", "--local_rank=0", "--epochs", "3"]
    with pytest.raises(ValueError, match="--no_python"):
        launch.rank_command(parsed("--no_python", "--module"), 0)


def test_the_command_starts_the_ranks_and_ends_with_their_status(tmp_path: Path):
    """As DeepSpeed's test of user arguments does, with quotes and spaces in one."""
    script, logs = tmp_path / "train.py", tmp_path / "logs"
    script.write_text(SCRIPT)
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PATH": f"{as_deepspeed._COMMANDS}:{os.environ['PATH']}"}
    environment |= {"ZENGINE_PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(sys.path)}
    line = ["deepspeed", "--include", "localhost:0,1", "--enable_each_rank_log", str(logs), str(script), "--prompt"]
    host = tmp_path / "hosts"
    host.write_text("localhost slots=2\n")
    line[1:1] = ["--hostfile", str(host), "--no_ssh", "--node_rank", "0", "--master_addr", "127.0.0.1"]
    done = subprocess.run([*line, """I'm 72" tall"""], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [
        json.loads(path.read_text()) for path in sorted(logs.glob("*_rank*.log"), key=lambda path: path.name[-5])
    ]
    assert [(each["RANK"], each["local_rank"], each["WORLD_SIZE"]) for each in found] == [
        ("0", 0, "2"),
        ("1", 1, "2"),
    ]
    assert all(each["is_ours"] and each["prompt"] == """I'm 72" tall""" for each in found)
    world = runner.encode_world_info({"localhost": [0, 1]})
    options = [f"--world_info={world}", f"--enable_each_rank_log={logs}", str(script), "--prompt", "fail"]
    assert launch.run_ranks(launch.parse_args(options)) == 3


def test_the_command_is_found_after_install_only(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/usr/bin")
    for name in as_deepspeed._LOOK_ONCE:
        monkeypatch.delitem(sys.modules, name, raising=False)
    as_deepspeed.install()
    try:
        assert os.environ["PATH"].split(os.pathsep) == [as_deepspeed._COMMANDS, "/usr/bin"]
        assert os.access(Path(as_deepspeed._COMMANDS, "deepspeed"), os.X_OK)
    finally:
        as_deepspeed.uninstall()
    assert (os.environ["PATH"], as_deepspeed._PYTHON in os.environ) == ("/usr/bin", False)
