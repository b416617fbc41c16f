"""Hosts, which are pid namespaces, and the identity of processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from zcomm import hosts
from zcomm.hosts import has_ended, process_identity, this_host

PRINT_HOST = [sys.executable, "-S", "-c", "import runpy; print(runpy.run_path('hosts.py')['this_host']())"]
NEW_PID_NAMESPACE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]


def host_of_child(*prefix: str) -> str | None:
    """Host of a child process started with a command prefix; None if it cannot be started."""
    folder = str(hosts.__file__).rpartition("/")[0]
    try:
        done = subprocess.run([*prefix, *PRINT_HOST], cwd=folder, capture_output=True, text=True, timeout=600)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def test_kills_for_memory_of_the_control_group_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_GROUPS", tmp_path)
    assert hosts.memory_kills() == ""
    (tmp_path / "memory.events").write_text("oom 3\noom_kill 2\n")
    assert hosts.memory_kills() == "; its control group has had 2 kills for memory"


def test_a_process_started_here_is_on_this_host() -> None:
    assert this_host()
    assert host_of_child() == this_host()


def test_a_process_that_cannot_see_our_pids_is_on_another() -> None:
    other = host_of_child(*NEW_PID_NAMESPACE)
    if other is None:
        pytest.skip("this machine does not permit new pid namespaces")
    assert other.partition(" ")[0] == this_host().partition(" ")[0]
    assert other != this_host()


def test_an_unknown_host_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_PIDS", "/proc/self/ns/nothing")
    assert this_host() == ""


def test_a_process_has_ended_if_its_pid_is_unused_or_has_another_start_time() -> None:
    mine = process_identity()
    assert not has_ended(mine)
    assert not has_ended(mine | {"host": "elsewhere", "started": "0"}), "it cannot be seen from here"
    assert has_ended(mine | {"started": "1"}), "the pid belongs to a later process"
