"""Cores of a process: runs of neighbours, for all of them together every core once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zengine.commands.bound import cores_of


@pytest.mark.parametrize(("available", "size"), [(range(8), 2), (range(16), 4), ([1, 3, 5, 7], 2), (range(5), 5)])
def test_cores_are_shared_out_once_and_in_runs(available: range, size: int) -> None:
    shares = [cores_of(available, rank, size) for rank in range(size)]
    assert sorted(core for share in shares for core in share) == list(available)
    assert all(share == sorted(share) for share in shares)


def test_more_processes_than_cores_take_turns() -> None:
    assert [cores_of([4, 6], rank, 3) for rank in range(3)] == [[4], [6], [4]]


SCRIPT = """
import json, os, sys
print(json.dumps([sorted(os.sched_getaffinity(0)), os.environ["OMP_NUM_THREADS"], sys.argv]))
"""


def test_a_module_finds_itself_bound_with_its_own_arguments(tmp_path: Path) -> None:
    """A script does, too: see test_run.py."""
    (tmp_path / "tell_cores.py").write_text(SCRIPT)
    names = ["-m", "tell_cores"]
    environ = {**os.environ, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(len(os.sched_getaffinity(0)))}
    command = [sys.executable, "-m", "zengine.commands.bound", *names, "--x", "1"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True)
    cores, threads, argv = json.loads(done.stdout)
    assert cores == [min(os.sched_getaffinity(0))]
    assert threads == "1"
    assert argv[1:] == ["--x", "1"]
