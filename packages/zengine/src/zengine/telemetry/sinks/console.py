"""Lines for people: every `interval` boundaries the state of training, and each skipped step with its reason.

Times and rates are means since the line before, so a line stands for its whole interval; loss, learning rate
and gradient norm are those of the step named.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import final

import attrs

from zengine.telemetry.snapshot import Snapshot
from zengine.telemetry.spans import COMMUNICATION
from zengine.telemetry.throughput import Rate

_LABELS = {COMMUNICATION: "communication"}  # timers whose name is not plain words


@attrs.frozen
class Window:
    """What accumulated since the line before."""

    steps: int = 0
    rate: Rate = attrs.field(factory=Rate)
    phase_ms: dict[str, float] = attrs.field(factory=dict)  # totals by timer

    def plus(self, snapshot: Snapshot) -> Window:
        phases = {timer: self.phase_ms.get(timer, 0.0) + ms for timer, ms in snapshot.phase_ms.items()}
        return Window(self.steps + 1, self.rate + snapshot.rate, phases)


def format_line(snapshot: Snapshot, window: Window) -> str:
    """One line for a boundary; parts that were not measured are left out."""
    report = snapshot.report
    parts = [
        f"step {report.step}" + ("" if report.applied else f" SKIPPED: {report.reason}"),
        f"loss {report.loss:.4f}",
        "lr " + ", ".join(f"{lr:.3e}" for lr in report.lr),
        f"grad norm {report.grad_norm:.3f}",
        *_scale(report.loss_scale),
        *_rate(window),
        *_memory(snapshot),
    ]
    return " | ".join(parts)


def _scale(loss_scale: float) -> list[str]:
    return [] if loss_scale == 1 else [f"loss scale {loss_scale:g}"]


def _rate(window: Window) -> list[str]:
    rate = [f"{window.rate.samples_per_s:.1f} samples/s", f"step {window.rate.step_ms:.1f} ms"]
    phases = [f"{_LABELS.get(timer, timer)} {ms / window.steps:.1f}" for timer, ms in window.phase_ms.items()]
    parts = rate if window.rate else []
    if phases:
        return [*parts[:1], " ".join([*parts[1:], f"({', '.join(phases)} ms)"])]
    return parts


def _memory(snapshot: Snapshot) -> list[str]:
    """Device memory where there is some, else that of the process; then the marks after each phase."""
    mib = {name: f"{nbytes / 2**20:.0f}" for name, nbytes in snapshot.memory.items()}
    kind = "cuda" if "cuda" in mib else "process"
    words = ((kind, "{} MiB"), (f"{kind}_peak", "{} MiB peak"))
    parts = [text.format(mib[name]) for name, text in words if name in mib]
    marks = [f"{name.replace('_', ' ')} {size}" for name, size in mib.items() if name.startswith("after_")]
    if marks:
        parts.append(f"{', '.join(marks)} MiB")
    return ["memory " + ", ".join(parts)] if parts else []


@final
class Console:
    """Prints to standard output, flushed. interval 0 prints no lines, only what is asked for at the end.

    `table()` is asked after every line that is due, `farewell()` at the end; "" prints nothing.
    """

    def __init__(self, interval: int, *, table: Callable[[], str], farewell: Callable[[], str]) -> None:
        self._interval = interval
        self._table = table
        self._farewell = farewell
        self._window = Window()

    def write(self, snapshot: Snapshot) -> None:
        if not self._interval:
            return
        self._window = self._window.plus(snapshot)
        due = snapshot.report.step % self._interval == 0
        if due or not snapshot.report.applied:
            _show(format_line(snapshot, self._window))
        if due:
            _show(self._table())
            self._window = Window()

    def close(self) -> None:
        _show(self._farewell())


def _show(text: str) -> None:
    if text:
        print(text, file=sys.stdout, flush=True)
