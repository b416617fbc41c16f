"""The journal of a run, and the progress line."""

from __future__ import annotations

import io
import json
import math

import pytest

from train.journal import Journal
from train.progress import Progress, amount, duration
from zengine import StepReport


def report(step: int, *, loss: float = 1.0, reason: str = "") -> StepReport:
    return StepReport(
        applied=not reason,
        reason=reason,
        step=step,
        applied_steps=step,
        skipped_steps=0,
        samples=8 * step,
        loss=loss,
        grad_norm=0.5,
        loss_scale=1.0,
        lr=(1e-3, 1e-3),
    )


def test_losses_keep_all_their_digits(tmp_path):
    journal = Journal(tmp_path / "losses.jsonl", writes=True, bytes_per_sample=4)
    journal.begin(step=0, samples=0)
    journal.add(report(1, loss=1 / 3), memory_bytes=5)
    journal.add_validation(1, math.pi)
    journal.close()
    step, look = journal.rows()
    assert step["loss"] == 1 / 3
    assert step["memory_bytes"] == 5
    assert step["lr"] == 1e-3
    assert step["bytes_per_s"] * step["ms"] / 1e3 == pytest.approx(32)
    assert look == {"step": 1, "validation": math.pi}


def test_resuming_drops_rows_after_the_checkpoint(tmp_path):
    path = tmp_path / "losses.jsonl"
    first = Journal(path, writes=True, bytes_per_sample=4)
    first.begin(step=0, samples=0)
    for step in range(1, 6):
        first.add(report(step), memory_bytes=0)
    first.close()
    path.write_text(path.read_text() + '{"step": 6, "lo')  # killed in the middle of a line

    second = Journal(path, writes=True, bytes_per_sample=4)
    second.begin(step=3, samples=24)
    row = second.add(report(4), memory_bytes=0)
    second.close()
    assert [row["step"] for row in second.rows()] == [1, 2, 3, 4]
    assert row["bytes_per_s"] * row["ms"] / 1e3 == pytest.approx(32)


def test_other_ranks_write_nothing(tmp_path):
    journal = Journal(tmp_path / "losses.jsonl", writes=False, bytes_per_sample=4)
    journal.begin(step=0, samples=0)
    journal.add(report(1), memory_bytes=0)
    journal.close()
    assert not (tmp_path / "losses.jsonl").exists()


def row(step: int, **changes) -> dict:
    base = {"step": step, "loss": math.log(2) * 3, "skipped": "", "ms": 250.0, "bytes_per_s": 14_800.0}
    return {**base, "memory_bytes": 400 * 2**20, **changes}


def test_a_file_gets_a_plain_line_every_ten_seconds():
    out = io.StringIO()
    progress = Progress(steps=100, prints=True, out=out)
    for step in range(1, 101):
        progress.show(row(step))
    first, last = out.getvalue().splitlines()
    assert first == "step   1/100  loss 2.079 (3.00 bits/byte)  14.8k tokens/s  250 ms  400 MiB  ETA 0:25"
    assert last.startswith("step 100/100")
    assert last.endswith("ETA 0:00")


def test_a_terminal_gets_one_line_that_rewrites_itself(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True)
    progress = Progress(steps=3, prints=True, out=out)
    for step in (1, 2, 3):
        progress.show(row(step))
    progress.print_line("done")
    assert out.getvalue().count("\r") == 4
    assert out.getvalue().count("\n") == 1
    assert max(map(len, out.getvalue().split("\r"))) <= 80 + len("\x1b[K")


def test_a_skipped_step_is_named_at_once():
    out = io.StringIO()
    progress = Progress(steps=9, prints=True, out=out)
    progress.show(row(1))
    progress.show(row(2, skipped="gradients of block.0.weight are not finite"))
    assert "step 2 was skipped: gradients of block.0.weight are not finite" in out.getvalue()


def test_other_ranks_are_silent():
    out = io.StringIO()
    progress = Progress(steps=1, prints=False, out=out)
    progress.show(row(1))
    progress.print_line("hello")
    assert out.getvalue() == ""


def test_durations_and_amounts_are_short():
    assert [duration(s) for s in (0.4, 65, 3725)] == ["0:00", "1:05", "1:02:05"]
    assert [amount(n) for n in (12, 14_812, 11_191_723)] == ["12", "14.8k", "11.2M"]


def test_rows_are_plain_json(tmp_path):
    journal = Journal(tmp_path / "losses.jsonl", writes=True, bytes_per_sample=4)
    journal.begin(step=0, samples=0)
    journal.add(report(1), memory_bytes=1)
    journal.close()
    assert json.loads((tmp_path / "losses.jsonl").read_text())["step"] == 1
