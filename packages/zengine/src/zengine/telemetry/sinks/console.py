"""Console sink: the state of training every `interval` boundaries, and each skipped step with its reason.

Times, rates and the loss are means since the last line; learning rate and gradient norm are those of the printed
step, and so is the loss of a skipped step that has a line of its own.  On a terminal the newest step is shown in a
line below that is overwritten (live.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import final

import attrs

from zengine.telemetry.sinks.base import Sink
from zengine.telemetry.sinks.live import LiveLine, make_line
from zengine.telemetry.snapshot import RecentLoss, Snapshot, speed
from zengine.telemetry.spans import COMMUNICATION, INNER
from zengine.telemetry.throughput import Rate
from zengine.telemetry.work import Fleet

_LABELS = {COMMUNICATION: "communication"}  # timers whose name is not plain words


@attrs.frozen
class Window:
    """Totals since the last line."""

    steps: int = 0
    rate: Rate = attrs.field(factory=Rate)
    phase_ms: dict[str, float] = attrs.field(factory=dict)  # totals by timer

    def plus(self, snapshot: Snapshot) -> Window:
        """Return the window with one more boundary; the first step with a rate discards the phases of the warm-up."""
        before = Window() if snapshot.rate and not self.rate else self
        phases = dict(before.phase_ms)
        for timer, ms in snapshot.phase_ms.items():
            phases[timer] = phases.get(timer, 0.0) + ms
        return Window(before.steps + 1, before.rate + snapshot.rate, phases)


def format_line(snapshot: Snapshot, window: Window, loss: float) -> str:
    """Format one boundary; parts that were not measured are left out."""
    report = snapshot.report
    parts = [
        f"step {report.step}" + ("" if report.applied else f" SKIPPED: {report.reason}"),
        *(f"epoch {passes:.2f}" for passes in snapshot.epochs),
        f"loss {loss:.4f}",
        "lr " + ", ".join(f"{lr:.3e}" for lr in report.lr),
        f"grad norm {report.grad_norm:.3f}",
        *_scale(report.loss_scale),
        *_rate(window, snapshot.fleet),
        *_memory(snapshot),
    ]
    return " | ".join(parts)


def _scale(loss_scale: float) -> list[str]:
    return [] if loss_scale == 1 else [f"loss scale {loss_scale:g}"]


def _rate(window: Window, fleet: Fleet) -> list[str]:
    numbers = speed(window.rate, fleet)
    words = (
        ("samples_per_second", "{:.1f} samples/s", 1.0),
        ("tokens_per_second", "{:,.0f} tokens/s", 1.0),
        ("tflops", "{:.3g} GFLOPS", 1000.0) if numbers.get("tflops", 1.0) < 0.1 else ("tflops", "{:.3g} TFLOPS", 1.0),
        ("mfu", "MFU {:.1f} %", 100.0),
    )
    parts = [text.format(numbers[name] * factor) for name, text, factor in words if name in numbers]
    step = [f"step {window.rate.step_ms:.1f} ms"] if window.rate else []
    phases = [
        f"{_LABELS.get(timer, timer)} {ms / window.steps:.1f}"
        for timer, ms in window.phase_ms.items()
        if timer != INNER
    ]
    if phases:
        step = [" ".join([*step, f"({', '.join(phases)} ms)"])]
    return [*parts, *step]


def _memory(snapshot: Snapshot) -> list[str]:
    """Return device memory, or process memory without a device, then the marks after each phase."""
    mib = {name: f"{nbytes / 2**20:.0f}" for name, nbytes in snapshot.memory.items()}
    kind = "cuda" if "cuda" in mib else "process"
    words = ((kind, "{} MiB"), (f"{kind}_peak", "{} MiB peak"))
    parts = [text.format(mib[name]) for name, text in words if name in mib]
    marks = [f"{name.replace('_', ' ')} {size}" for name, size in mib.items() if name.startswith("after_")]
    if marks:
        parts.append(f"{', '.join(marks)} MiB")
    return ["memory " + ", ".join(parts)] if parts else []


@final
class Console(Sink):
    """Prints to standard output and flushes.  interval 0 prints no step lines.

    `table()` is printed after every due line, `farewell()` at the end; "" prints nothing.
    """

    def __init__(
        self, interval: int, *, table: Callable[[], str], farewell: Callable[[], str], line: LiveLine | None = None
    ) -> None:
        self._interval = interval
        self._table = table
        self._farewell = farewell
        self._line = line or make_line(sys.stdout)
        self._window = Window()
        self._loss = RecentLoss(max(1, interval))

    def write(self, snapshot: Snapshot) -> None:
        if not self._interval:
            return
        self._window = window = self._window.plus(snapshot)
        due, loss = snapshot.report.step % self._interval == 0, self._loss.add(snapshot.report)
        if due or not snapshot.report.applied:
            self._print(format_line(snapshot, window, loss if due else snapshot.report.loss))
        if due:
            self._print(self._table())
            self._window = Window()
            self._loss.clear()
        self._line.show(lambda: format_line(snapshot, window, loss))

    def close(self) -> None:
        self._line.close()
        self._print(self._farewell())

    def _print(self, text: str) -> None:
        if text:
            self._line.print_above(text)
