"""Pieces of tools/gpu_acceptance.py on the simulated device: they pass, planted faults turn them red, runs resume.

A few pieces are in this file, which runs everywhere; tests/tools/test_gpu_acceptance_pieces.py has all of them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from acceptance.child import run_piece
from acceptance.plants import PLANTS
from acceptance.replay import WAITS, violations
from acceptance.report import MOST_BYTES
from acceptance.table import choose
from acceptance.verdict import Judgement, State, Verdict
from simulated_cuda.library import library, take_violations

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tools" / "gpu_acceptance.py"
A_BIT_AND_WAITS = ("batch-bit", "loader-wait", "trace-wait")


@pytest.fixture(autouse=True)
def _violations_are_the_pieces() -> Iterator[None]:
    yield
    library().sim_reset_order()
    take_violations()


def verdict_of(name: str, folder: Path, plant: str = "") -> Verdict:
    (piece,) = choose(name)
    return run_piece(piece, folder, plant)


@pytest.mark.parametrize("name", ["loaders", "timers", "trace"])
def test_a_piece_checks_bits_and_order_and_measures_nothing(name: str, tmp_path: Path) -> None:
    verdict = verdict_of(name, tmp_path)
    assert verdict.state is State.PASSED, verdict
    assert "every access is ordered" in verdict.checks
    assert {figure.judgement for figure in verdict.figures} <= {Judgement.NOT_MEASURED}


def test_the_record_is_kept_and_can_be_replayed_anywhere(tmp_path: Path) -> None:
    verdict_of("trace", tmp_path)
    (kept,) = tmp_path.glob("*-trace.json")
    assert kept.stat().st_size <= MOST_BYTES
    records = json.loads(kept.read_text())
    assert set(records) == {"offload", "load", "save"}
    for entries in records.values():
        assert violations(entries) == []
        assert violations([entry for entry in entries if entry[0] not in WAITS]) != []


@pytest.mark.parametrize("plant", A_BIT_AND_WAITS)
def test_a_planted_fault_turns_its_piece_red(plant: str, tmp_path: Path) -> None:
    verdict = verdict_of(PLANTS[plant].piece, tmp_path, plant)
    assert verdict.state is State.FAILED, verdict
    if plant.startswith("trace"):
        assert "the replay of offload" in verdict.reason, "the record and its replay find it by themselves"


def command(folder: Path, *more: str) -> list[str]:
    own = ["--state", str(folder / "state.json"), "--results", str(folder)]
    return [sys.executable, str(SCRIPT), "--device", "simulated", "--only", "timers,loaders", *own, *more]


def test_a_run_that_was_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    """Killed while the second piece runs: the first is not repeated, and no process is left."""
    with subprocess.Popen(command(tmp_path), stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if line.startswith("[2/2]"):
                break
        while not (children := children_of(run.pid)):
            time.sleep(0.01)
        time.sleep(1.0)  # into the piece
        os.kill(run.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while any(map(is_alive, children)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, children)), "a piece ends with its runner"
    again = subprocess.run(command(tmp_path), capture_output=True, text=True, check=True)
    assert "[1/2] timers: passed before" in again.stdout
    assert "[2/2] loaders: passed in" in again.stdout
    (report,) = tmp_path.glob("*[0-9].json")
    states = {each["piece"]: each["state"] for each in json.loads(report.read_text())["pieces"]}
    assert (states.pop("timers"), states.pop("loaders")) == ("passed", "passed")
    assert set(states.values()) == {"not run"}


def children_of(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        found += [int(path.parent.name)] if int(fields[1]) == pid else []
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
