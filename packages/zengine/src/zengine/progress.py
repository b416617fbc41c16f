"""Progress of work that may take long: silent for two seconds, then a line on standard error, on rank 0 only.

    with progress("loading runs/a"):                         loading runs/a ... 14 s
        ...
    with progress("judging windows", len(windows)) as advance:
        for window in windows:
            ...
            advance()                                        judging windows: 12 of 48, 0:24, about 1:12 left

A thread draws, so work that cannot report (a long read, a call into C) is shown, too; it ends with the block.  On a
terminal the line is rewritten and disappears; a log gets a plain line every ten seconds and one at the end.
ZENGINE_PROGRESS=0 silences it.  Rejected: tqdm and rich, two dependencies for a line, neither of which draws while
the loop is inside one iteration; a callback through every layer below, which the leaf packages would have to call.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO, final

__all__ = ["duration", "progress"]

SILENT_S = 2.0  # of each block
LIVE_S = 0.25  # between two drawings on a terminal
PLAIN_S = 10.0  # between two lines of a log


def duration(seconds: float) -> str:
    """Format seconds: 14.0 -> "14 s", 325.0 -> "5:25".

    >>> duration(14.0), duration(325.0), duration(3725.0)
    ('14 s', '5:25', '1:02:05')
    """
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{rest} s"


@contextmanager
def progress(what: str, total: int = 0, *, silent_s: float = SILENT_S) -> Iterator[Callable[[], None]]:
    """Show that the block is running; yield a function to call after each of its `total` parts.

    what: the work, in words, e.g. "loading runs/a".  total: 0: not known.  silent_s: seconds before the first line.
    Nothing is shown on ranks other than 0, or with ZENGINE_PROGRESS=0.
    """
    if not _is_wanted():
        yield _nothing
        return
    ticker = _Ticker(what, total, sys.stderr, silent_s)
    thread = threading.Thread(target=ticker.run, name="zengine-progress", daemon=True)
    thread.start()
    try:
        yield ticker.advance
    finally:
        ticker.over.set()
        thread.join()
        ticker.end()


def _is_wanted() -> bool:
    if os.environ.get("ZENGINE_PROGRESS", "1") == "0":
        return False
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return bool(distributed.get_rank() == 0)
    return os.environ.get("RANK", "0") == "0"


def _nothing() -> None: ...


@final
class _Ticker:
    """Line of one block.  `advance` is called by its thread, the rest by that of the line."""

    def __init__(self, what: str, total: int, out: TextIO, silent_s: float) -> None:
        self._what = what
        self._total = total
        self._out = out
        self._silent_s = silent_s
        self._live = out.isatty()
        self._start = time.monotonic()
        self._done = 0  # parts
        self._was_shown = False
        self.over = threading.Event()

    def advance(self) -> None:
        self._done += 1

    def run(self) -> None:
        wait_s = self._silent_s
        while not self.over.wait(wait_s):
            self._was_shown = True
            self._write(self.line())
            wait_s = LIVE_S if self._live else PLAIN_S

    def line(self) -> str:
        """Format the state of now."""
        seconds = time.monotonic() - self._start
        if not self._total:
            return f"{self._what} ... {duration(seconds)}"
        left = f", about {duration(seconds * (self._total / self._done - 1))} left" if self._done else ""
        return f"{self._what}: {self._done:,} of {self._total:,}, {duration(seconds)}{left}"

    def end(self) -> None:
        """Take the line off a terminal; say in a log how long it took."""
        if self._was_shown:
            self._write("" if self._live else f"{self._what}: {duration(time.monotonic() - self._start)} in all")

    def _write(self, text: str) -> None:
        if self._live:
            text = f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}"
        try:
            print(text, end="" if self._live else "\n", file=self._out, flush=True)
        except (OSError, ValueError):  # a closed stream: nobody reads it
            self.over.set()
