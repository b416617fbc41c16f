"""Output of the commands: exit status, sizes, tables, JSON, and a progress bar on terminals."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO, final

import attrs

OK = 0  # success; diff: no difference
CORRUPT = DIFFERS = 1  # a checkpoint is damaged; diff: the checkpoints differ
ABSENT = USAGE = 2  # no such checkpoint, never committed, or wrong usage (argparse's status too)
FAILED = 3  # the disk, the store or a lock failed

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_BAR = 30  # characters


def size_text(nbytes: float) -> str:
    """ "1.39 GiB"."""
    unit = 0
    while nbytes >= 1000 and unit < len(_UNITS) - 1:
        nbytes, unit = nbytes / 1024, unit + 1
    return f"{nbytes:.0f} B" if unit == 0 else f"{nbytes:.3g} {_UNITS[unit]}"


def count_text(count: int, noun: str) -> str:
    """ "1 tensor", "1,024 tensors"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Lines with aligned columns; `right` lists the right-aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def some(lines: Sequence[str], limit: int) -> list[str]:
    """The first `limit` lines and the number of the others; all lines if the limit is 0."""
    shown = list(lines) if limit == 0 else list(lines[:limit])
    return [*shown, f"... and {len(lines) - len(shown):,} more"] if len(lines) > len(shown) else shown


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, sort_keys=True, allow_nan=False))


@final
@attrs.define(eq=False)
class Progress:
    """Progress bar, drawn on a terminal only: a log file gets only the result."""

    total_nbytes: int
    label: str
    stream: TextIO = attrs.field(factory=lambda: sys.stderr)
    done_nbytes: int = 0
    started_s: float = attrs.field(factory=time.monotonic)
    drawn_s: float = 0.0

    def advance(self, nbytes: int) -> None:
        self.done_nbytes += nbytes
        now = time.monotonic()
        if self.stream.isatty() and (now - self.drawn_s > 0.1 or self.done_nbytes >= self.total_nbytes):
            self.drawn_s = now
            self.stream.write(f"\r{self.line(now - self.started_s)}\x1b[K")
            self.stream.flush()

    def line(self, elapsed_s: float) -> str:
        """ "step-100 [###...]  45%  0.6 of 1.4 GiB, 1.2 GiB/s"."""
        share = min(1.0, self.done_nbytes / max(self.total_nbytes, 1))
        bar = ("#" * int(share * _BAR)).ljust(_BAR, ".")
        rate = f", {size_text(self.done_nbytes / elapsed_s)}/s" if elapsed_s > 0 else ""
        sizes = f"{size_text(self.done_nbytes)} of {size_text(self.total_nbytes)}"
        return f"{self.label} [{bar}] {share:4.0%}  {sizes}{rate}"

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.stream.isatty() and self.drawn_s:
            self.stream.write("\r\x1b[K")
            self.stream.flush()
