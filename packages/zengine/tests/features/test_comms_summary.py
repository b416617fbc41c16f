"""Collectives of a rank, in the run's folder."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

import zcomm
from zengine.config.plan.telemetry import CommsPlan
from zengine.features import comms_summary
from zengine.features.comms_summary import CommsSummary

ENGINE = SimpleNamespace(parts=SimpleNamespace(world=SimpleNamespace(rank=1, world_size=2)))


def communicate(op: str) -> None:
    """As if a collective had come to its end."""
    record = zcomm.Record(
        op=op, label="bucket", nbytes=8, ms=2.0, group_size=2, dtype="float32", numel=2, wait_ms=1.0
    )
    zcomm.collectives.trace.deliver(zcomm.collectives.trace.open_sinks(), record)


def test_a_rank_writes_what_it_counted_when_it_closes(tmp_path: Path) -> None:
    summary = CommsSummary(CommsPlan(enabled=True, prof_all=False, prof_ops=("all_reduce",)), tmp_path / "run")
    summary.attach(ENGINE)
    communicate("all_reduce")
    communicate("all_gather")
    summary.close()
    communicate("all_reduce")
    found = json.loads((tmp_path / "run" / "comms.rank1.json").read_text())
    assert (found["rank"], found["world_size"]) == (1, 2)
    assert [(each["op"], each["count"], each["wait_ms"]) for each in found["messages"]] == [("all_reduce", 1, 1.0)]


def test_a_run_that_is_killed_leaves_what_it_counted_a_while_ago(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comms_summary, "INTERVAL_S", 0.0)
    summary = CommsSummary(CommsPlan(enabled=True), tmp_path)
    summary.attach(ENGINE)
    summary.step_end(SimpleNamespace())
    assert [path.name for path in tmp_path.iterdir()] == ["comms.rank1.json"]
    summary.close()


def test_a_disk_that_fails_is_told_once_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(comms_summary, "INTERVAL_S", 0.0)
    (tmp_path / "run").write_text("a file where the folder should be")
    summary = CommsSummary(CommsPlan(enabled=True), tmp_path / "run")
    summary.attach(ENGINE)
    for _ in range(2):
        summary.step_end(SimpleNamespace())
    summary.close()
    (told,) = caplog.messages
    assert f"the collectives of this rank in {tmp_path / 'run'}: writing failed" in told


def test_verbose_tells_each(caplog: pytest.LogCaptureFixture) -> None:
    summary = CommsSummary(CommsPlan(enabled=True, verbose=True, debug=True), None)
    summary.attach(ENGINE)
    with caplog.at_level(logging.INFO, "zengine"):
        communicate("all_reduce")
    summary.close()
    communicate("all_reduce")
    assert caplog.messages == ["all_reduce [bucket]: 8 B over 2 ranks, 2.00 ms, waited 1.00 ms"]
