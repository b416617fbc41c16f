"""losses.jsonl: what happened at every step, one JSON object a line.

    {"step": 7, "loss": 4.61..., "lr": ..., "grad_norm": ..., "ms": ..., ...}      a step
    {"step": 50, "validation": 2.31...}                                            a look at held-out text

Losses are nats per byte with all their digits, so two runs can be compared bit for bit.  A resumed run first cuts
the lines after its checkpoint: those steps will be done again, and the file reads as if nothing had happened.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from zengine.step_report import StepReport

Row = dict[str, Any]


class Journal:
    """Appends to the file on rank 0; the same calls on other ranks do nothing to it."""

    def __init__(self, path: Path, *, writes: bool, bytes_per_sample: int) -> None:
        self._path = path
        self._writes = writes
        self._bytes_per_sample = bytes_per_sample
        self._samples = 0  # seen by all ranks at the last boundary
        self._since = time.perf_counter()  # end of the last boundary, moved on by pauses
        self._file: TextIO | None = None

    def begin(self, *, step: int, samples: int) -> None:
        """Forget what came after `step`, and start the clock."""
        if self._writes:
            kept = [row for row in self.rows() if row["step"] <= step]
            self._path.write_text("".join(json.dumps(row) + "\n" for row in kept))
            self._file = self._path.open("a")
        self._samples, self._since = samples, time.perf_counter()

    def rows(self) -> list[Row]:
        """All lines so far; a last line that a kill cut short is left out."""
        lines = self._path.read_text().splitlines(keepends=True) if self._path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def add(self, report: StepReport, *, memory_bytes: int) -> Row:
        """A step is done; its time is what has passed since the one before, pauses left out."""
        now = time.perf_counter()
        seconds = now - self._since
        row: Row = {
            "step": report.step,
            "loss": report.loss,
            "lr": report.lr[0],
            "grad_norm": report.grad_norm,
            "skipped": report.reason,
            "ms": seconds * 1e3,
            "bytes_per_s": (report.samples - self._samples) * self._bytes_per_sample / seconds,
            "memory_bytes": memory_bytes,
        }
        self._samples, self._since = report.samples, now
        self._write(row)
        return row

    def add_validation(self, step: int, loss: float) -> None:
        self._write({"step": step, "validation": loss})

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Around what is not training: validation, saving."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - begun

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, row: Row) -> None:
        if self._file is not None:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
