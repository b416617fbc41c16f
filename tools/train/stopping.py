"""When to stop before the last step, agreed among the ranks.

A rank that stopped alone would leave the others waiting in a collective.  So every rank only *wishes* to stop
(a signal came, the control line closed, the time is up), and at each step boundary one all-reduce of a single
number tells all of them the same: the strongest wish of any.
"""

from __future__ import annotations

import enum
import os
import select
import signal
import time
from types import FrameType

import torch

import zcomm

from .launch import CONTROL


class Wish(enum.IntEnum):
    """In order of strength."""

    GO_ON = 0
    TIME_IS_UP = 1  # finish as usual: validate, report
    INTERRUPTED = 2  # save and leave


class Stopping:
    """Listens for reasons to stop on this rank; `agreed` is collective."""

    def __init__(self, *, minutes: float, die_at: int = 0) -> None:
        self._deadline = time.monotonic() + minutes * 60
        self._die_at = die_at  # the step after which to die at once; 0 never: stands for a power cut
        self._signalled = False
        self._listens = os.environ.get(CONTROL) == "1"
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def agreed(self, step: int, device: torch.device) -> Wish:
        """What all ranks do after `step`; every rank must call it."""
        if step == self._die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        wish = torch.tensor(float(self._wish()), device=device)
        zcomm.all_reduce(wish, op="max", label="stop")
        return Wish(int(wish.item()))

    def _wish(self) -> Wish:
        if self._signalled or self._line_closed():
            return Wish.INTERRUPTED
        return Wish.TIME_IS_UP if time.monotonic() > self._deadline else Wish.GO_ON

    def _line_closed(self) -> bool:
        """Whether the launcher let go of our standard input; nothing is ever written to it."""
        return self._listens and bool(select.select([0], [], [], 0)[0])

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._signalled = True
