"""Processes of one pid namespace are on one host, others are not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from zcomm import hosts
from zcomm.hosts import this_host

ASK = [sys.executable, "-S", "-c", "import runpy; print(runpy.run_path('hosts.py')['this_host']())"]
ONE_RANK_PER_HOST = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]


def asked(*around: str) -> str | None:
    """Answer of another process; None if it cannot be started so."""
    folder = str(hosts.__file__).rpartition("/")[0]
    try:
        done = subprocess.run([*around, *ASK], cwd=folder, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def test_a_process_started_here_is_on_this_host() -> None:
    assert this_host()
    assert asked() == this_host()


def test_a_process_that_cannot_see_our_pids_is_on_another() -> None:
    other = asked(*ONE_RANK_PER_HOST)
    if other is None:
        pytest.skip("this machine lets nobody make a pid namespace")
    assert other.partition(" ")[0] == this_host().partition(" ")[0]
    assert other != this_host()


def test_an_unknown_host_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_PIDS", "/proc/self/ns/nothing")
    assert this_host() == ""
