"""Progress: silent when short or unwanted, lines in logs, one rewritten line on terminals."""

from __future__ import annotations

import io
import re
import sys
import threading
import time

import pytest
import torch

import zengine.progress
from zcomm.testing import run_ranks
from zengine.progress import duration, progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZENGINE_PROGRESS", "1")
    monkeypatch.delenv("RANK", raising=False)


def shown(monkeypatch: pytest.MonkeyPatch, out: io.StringIO) -> str:
    """Return what a block of three parts shows that lasts until its line was drawn."""
    monkeypatch.setattr(sys, "stderr", out)
    with progress("reading", 3, silent_s=0.01) as advance:
        advance()
        deadline = time.monotonic() + 60
        while "1 of 3" not in out.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    return out.getvalue()


def test_a_log_gets_a_line_and_the_time_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zengine.progress, "PLAIN_S", 0.05)
    *lines, last = shown(monkeypatch, io.StringIO()).splitlines()
    assert re.fullmatch(r"reading: 1 of 3, \d+ s, about \S+( s)? left", lines[-1])
    assert last.startswith("reading: ")
    assert last.endswith(" in all")


def test_on_a_terminal_the_line_is_rewritten_and_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, Terminal())
    assert "\n" not in text
    assert text.startswith("\r\x1b[Kreading: ")
    assert re.search(r"\r\x1b\[Kreading: 1 of 3, \d+ s", text)
    assert text.endswith("\r\x1b[K")


def test_short_blocks_are_silent_and_leave_no_thread(capsys: pytest.CaptureFixture[str]) -> None:
    before = threading.active_count()
    with progress("reading"):
        pass
    assert threading.active_count() == before
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("name", "value"), [("ZENGINE_PROGRESS", "0"), ("RANK", "1")])
def test_other_ranks_and_an_off_switch_are_silent(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)  # an earlier test may have left a group
    with progress("reading", 2, silent_s=0.0) as advance:
        time.sleep(0.05)
        advance()
    assert capsys.readouterr().err == ""


def on_ranks() -> bool:
    return zengine.progress._is_wanted()


def test_only_rank_0_of_a_world_shows_progress() -> None:
    assert run_ranks(on_ranks, 2) == [True, False]


def run_out(out: io.StringIO) -> None:
    """Raise when the line was drawn."""
    deadline = time.monotonic() + 60
    while not out.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)
    raise TimeoutError


def test_an_exception_passes_and_ends_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    with pytest.raises(TimeoutError), progress("reading", silent_s=0.0):
        run_out(out)
    assert re.match(r"reading \.\.\. \d+ s\n", out.getvalue())


def test_a_closed_stream_does_not_stop_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    with progress("reading", silent_s=0.0):
        out.close()
        time.sleep(0.05)


@pytest.mark.parametrize(("seconds", "text"), [(0.0, "0 s"), (59.6, "1:00"), (3725.0, "1:02:05")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
