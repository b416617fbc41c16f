"""Progress line of rank 0: step, loss, speed, memory, remaining time.

On a terminal one line is rewritten; into a file or a pipe a plain line is printed every ten seconds.
"""

from __future__ import annotations

import math
import resource
import shutil
import sys
import time
from collections import deque
from pathlib import Path
from typing import TextIO

import torch

from .journal import Row

PLAIN_INTERVAL_S = 10.0
LN2 = math.log(2)


def duration(seconds: float) -> str:
    """Format seconds: 325.0 -> "5:25"."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def amount(number: float) -> str:
    """Format a number: 14812 -> "14.8k"."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{suffix}"
    return f"{number:.3g}"


def memory_bytes(device: torch.device) -> int:
    """Return this rank's memory: allocated on a GPU, else resident (the peak where there is no /proc)."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


class Progress:
    """Prints rows of the journal as they come, on rank 0 only."""

    def __init__(self, *, steps: int, prints: bool, out: TextIO | None = None) -> None:
        self._steps = steps
        self._prints = prints
        self._out = sys.stdout if out is None else out
        self._live = self._out.isatty()
        self._recent: deque[Row] = deque(maxlen=20)  # rates are averaged over these
        self._last_shown = -math.inf

    def show(self, row: Row) -> None:
        """Show one more step."""
        if not self._prints:
            return
        self._recent.append(row)
        if row["skipped"]:
            self.print_line(f"step {row['step']} was skipped: {row['skipped']}")
        now = time.monotonic()
        is_last = row["step"] == self._steps
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{self.line(row)[:width]}", end="", file=self._out, flush=True)
        elif is_last or now - self._last_shown >= PLAIN_INTERVAL_S:
            self._last_shown = now
            print(f"step {self.line(row)}", file=self._out, flush=True)

    def line(self, row: Row) -> str:
        """Format one step in less than 80 columns; rates and ETA are means over the recent steps."""
        recent = [*self._recent] or [row]
        ms = sum(each["ms"] for each in recent) / len(recent)
        rate = sum(each["bytes_per_s"] * each["ms"] for each in recent) / (ms * len(recent))
        eta = duration((self._steps - row["step"]) * ms / 1e3)
        place = f"{row['step']:>{len(str(self._steps))}}/{self._steps}"
        loss = f"loss {row['loss']:.3f} ({row['loss'] / LN2:.2f} bits/byte)"
        speed = f"{amount(rate)} tokens/s  {ms:.0f} ms"
        return f"{place}  {loss}  {speed}  {row['memory_bytes'] / 2**20:.0f} MiB  ETA {eta}"

    def print_line(self, text: str) -> None:
        """Print a line that is not rewritten."""
        if self._prints:
            print(f"\r\x1b[K{text}" if self._live else text, file=self._out, flush=True)
