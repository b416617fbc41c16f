"""Live line at the bottom of a terminal: shows the newest step and is overwritten by the next.

Drawn by `rich` where it is installed, which keeps the program's prints above it.  Without rich the line ends in a
carriage return, so the program's own prints overwrite it.  Logs, pipes and notebooks get no live line.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import Any, Protocol, TextIO, final

from zengine.telemetry.sinks.base import is_installed

INTERVAL_S = 0.1  # between two drawings; faster is unreadable


class LiveLine(Protocol):
    """A line that is replaced in place."""

    def show(self, text: Callable[[], str]) -> None:
        """Draw a text if due; otherwise it is not even formatted."""

    def print_above(self, text: str) -> None:
        """Print permanent lines."""

    def close(self) -> None: ...


@final
class NoLiveLine:
    """Null object, for logs: prints permanent lines only, to the current standard output."""

    def show(self, text: Callable[[], str]) -> None: ...

    def print_above(self, text: str) -> None:
        print(text, flush=True)

    def close(self) -> None: ...


@final
class PlainLine:
    """Live line drawn with carriage returns."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._due = 0.0  # clock at which it may be drawn again
        self._width = 0  # characters on the screen now

    def show(self, text: Callable[[], str]) -> None:
        if self._clock() >= self._due:
            self._due = self._clock() + INTERVAL_S
            line = text()[: shutil.get_terminal_size().columns - 1]
            self._stream.write(line.ljust(self._width) + "\r")
            self._stream.flush()
            self._width = len(line)

    def print_above(self, text: str) -> None:
        first, *rest = text.splitlines() or [""]
        print(first.ljust(self._width), *rest, sep="\n", file=self._stream, flush=True)
        self._width = 0

    def close(self) -> None:
        if self._width:
            self._stream.write(" " * self._width + "\r")
            self._stream.flush()
            self._width = 0


@final
class RichLine:
    """Live line drawn by `rich.live`, without a thread: it refreshes when a step ends."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console: Any = Console(file=stream)
        self._live: Any = Live(console=self._console, auto_refresh=False, transient=True)
        self._clock = clock
        self._due = 0.0
        self._live.start()
        self._console.show_cursor(True)  # so that a crash does not leave the terminal without one

    def show(self, text: Callable[[], str]) -> None:
        from rich.text import Text

        if self._clock() >= self._due:
            self._due = self._clock() + INTERVAL_S
            line = Text(text(), style="dim", no_wrap=True, overflow="ellipsis")
            self._live.update(line, refresh=True)

    def print_above(self, text: str) -> None:
        from rich.text import Text

        self._console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        self._live.stop()


def make_line(stream: TextIO) -> LiveLine:
    """Return the live line that suits the stream."""
    if not stream.isatty():
        return NoLiveLine()
    return RichLine(stream) if is_installed("rich") else PlainLine(stream)
