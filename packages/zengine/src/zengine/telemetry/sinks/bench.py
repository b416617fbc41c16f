"""Summary of a bench run (`bench_steps`), printed once after enough measured steps."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from typing import final

from zengine.telemetry.sinks.base import Sink
from zengine.telemetry.snapshot import Snapshot, speed
from zengine.telemetry.throughput import Rate

_LABELS = {
    "samples_per_second": ("samples/s", 1.0),
    "tokens_per_second": ("tokens/s", 1.0),
    "tflops": ("TFLOPS of a device, by the formula", 1.0),
    "tflops_counted": ("TFLOPS of a device, counted", 1.0),
    "mfu": ("MFU, % of the device's peak", 100.0),
}


@final
class Bench(Sink):
    """Collects `steps` measured steps, prints them, and does nothing afterwards."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._rates: list[Rate] = []  # of the measured steps
        self._memory: dict[str, int] = {}  # bytes by owner, the last known ones

    def write(self, snapshot: Snapshot) -> None:
        self._memory.update(snapshot.memory)
        if not snapshot.rate or len(self._rates) == self._steps:
            return
        self._rates.append(snapshot.rate)
        if len(self._rates) == self._steps:
            print(summary(self._rates, self._memory, snapshot), file=sys.stdout, flush=True)


def summary(rates: list[Rate], memory: Mapping[str, int], last: Snapshot) -> str:
    """Format the measured steps up to snapshot `last`; `memory` is bytes of rank 0 by owner."""
    times = sorted(rate.step_ms for rate in rates)
    total = sum(rates, Rate())
    rows = [
        ("ms a step, median", f"{statistics.median(times):.2f}"),
        ("ms a step, 90th percentile", f"{times[max(0, -(-9 * len(times) // 10) - 1)]:.2f}"),
        ("ms a step, least and most", f"{times[0]:.2f} .. {times[-1]:.2f}"),
    ]
    for name, value in speed(total, last.fleet).items():
        if name in _LABELS:
            label, factor = _LABELS[name]
            rows.append((label, f"{value * factor:,.2f}"))
    rows += [(f"{owner}, MiB", f"{size / 2**20:,.1f}") for owner, size in memory.items()]
    width = max(len(label) for label, _ in rows)
    head = f"bench: steps {last.report.step - len(rates) + 1} to {last.report.step}, {last.fleet.num_devices} rank(s)"
    return "\n".join([head, *(f"  {label:{width}}  {value:>14}" for label, value in rows)])
