"""Early stop: the ranks decide together whether to stop before the last step.

A rank that stopped alone would leave the others waiting in a collective.  So each rank has a reason to stop or none
(a signal, a closed control pipe, the time limit), and an all-reduce of one number at each step boundary gives all of
them the strongest reason.
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


class StopReason(enum.IntEnum):
    """Reason of a rank to stop, in order of strength."""

    NONE = 0
    TIME_LIMIT = 1  # --minutes have passed: validate and report
    INTERRUPTED = 2  # save and exit


class StopVote:
    """Collects this rank's reason to stop; `decide` combines those of all ranks."""

    def __init__(self, *, minutes: float, die_at: int = 0) -> None:
        self._deadline = time.monotonic() + minutes * 60
        self._die_at = die_at  # SIGKILL after this step, to simulate a power cut; 0: never
        self._signalled = False
        self._listens = os.environ.get(CONTROL) == "1"
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def decide(self, step: int, device: torch.device) -> StopReason:
        """Return the strongest reason of any rank after `step`.  A collective of all ranks."""
        if step == self._die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        reason = torch.tensor(float(self._own_reason()), device=device)
        zcomm.all_reduce(reason, op="max", label="stop")
        return StopReason(int(reason.item()))

    def _own_reason(self) -> StopReason:
        if self._signalled or self._is_pipe_closed():
            return StopReason.INTERRUPTED
        return StopReason.TIME_LIMIT if time.monotonic() > self._deadline else StopReason.NONE

    def _is_pipe_closed(self) -> bool:
        """True if the launcher has closed our standard input; it writes nothing to it."""
        return self._listens and bool(select.select([0], [], [], 0)[0])

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._signalled = True
