"""Signals: a checkpoint, or an agreed exit, at the end of the step in which SIGTERM or SIGUSR1 arrives.

Clusters announce a pre-emption by a signal, often to one process only, and at any moment: inside a collective, in
the middle of a save, while the engine is being built.  A rank that saved or left alone would leave the others
waiting.  So the handler only records the signal, and at each boundary one all-reduce of two numbers tells all ranks
whether any of them was signalled.  They save the same step, and to leave they raise `StoppedBySignal`, a SystemExit
with the configured code, out of `step()` (or `train_batch()`), after the step is counted.

The handlers are installed at the beginning of `initialize`, so a signal during it counts for the first boundary: a
checkpoint before the loop has loaded its own would hide the newest one.  A second signal changes nothing (launchers
repeat them); `close()`, or the end of the last engine that has them, restores the handlers that were there before.

Rejected: a save inside the handler (tensors may be half updated, and other ranks are elsewhere); a number in the
all-reduce of the gradient norm (engines without the section would carry it, and pipelines and captured steps have
messages of their own); the caller's client_state of the last save (it belongs to another step: use "exit", catch
StoppedBySignal, and save in the loop).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, final

import torch

import zcomm
from zengine.engine.feature import Feature

if TYPE_CHECKING:
    from zengine.config.keys.faults import SignalSettings
    from zengine.engine.parts import Run
    from zengine.step_report import StepReport

__all__ = ["Catcher", "Signals", "StoppedBySignal", "catching"]

log = logging.getLogger("zengine")


class StoppedBySignal(SystemExit):
    """Raised on all ranks by `step()` at the boundary after a signal whose action is to exit.

    An uncaught one ends the process with the exit code of the config, `code`.
    """

    def __init__(self, code: int, signals: tuple[str, ...], folder: str) -> None:
        super().__init__(code)
        self.signals = signals  # such as "SIGTERM on rank 1"
        self.folder = folder  # the checkpoint; "" if none was saved


class Save(Protocol):
    """`Engine.save_checkpoint`."""

    def __call__(self, save_dir: str, *, client_state: Mapping[str, Any]) -> str: ...


# -- handlers of the process -----------------------------------------------------------------------

_catchers: dict[int, list[Catcher]] = {}  # open ones, by signal
_before: dict[int, Any] = {}  # handler to restore, by signal


@final
class Catcher:
    """Records signals while it is open.  Several may be open; each records all signals that it wants.

    Invariant: the handler of a signal is ours exactly while a catcher of this signal is open.
    """

    def __init__(self, numbers: tuple[int, ...]) -> None:
        self.numbers = numbers
        self.pending: set[int] = set()  # arrived, and not served yet

    def open(self) -> None:
        """Install the handlers.  Signals that another open catcher has recorded count as well.

        Raises:
            ValueError: called outside the main thread, where Python installs no handlers.
        """
        if self.numbers and threading.current_thread() is not threading.main_thread():
            raise ValueError(
                'the config\'s section "signals" needs initialize() in the main thread, where Python handles '
                f"signals; this is thread {threading.current_thread().name!r}. Call initialize() there, or leave the "
                "section out."
            )
        for number in self.numbers:
            others = _catchers.setdefault(number, [])
            if not others:
                _before[number] = signal.signal(number, _record)
            self.pending |= {number for other in others if number in other.pending}
            others.append(self)

    def close(self) -> None:
        """Restore the handlers if this is the last catcher.  Idempotent."""
        for number in self.numbers:
            others = _catchers.get(number, [])
            if self in others:
                others.remove(self)
                if not others:
                    _restore(number)


def _record(number: int, frame: FrameType | None) -> None:
    """Handle a signal: let every open catcher record it."""
    catchers = _catchers.get(number, ())
    for catcher in catchers:
        catcher.pending.add(number)
    if not catchers:  # the last one closed in another thread, which cannot restore the handler
        _restore(number)
        os.kill(os.getpid(), number)


def _restore(number: int) -> None:
    """Put the former handler back, unless somebody has replaced ours; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        return
    before = _before.pop(number, signal.SIG_DFL)
    if signal.getsignal(number) is _record:
        signal.signal(number, signal.SIG_DFL if before is None else before)


def _reset_after_fork() -> None:
    """Restore the handlers in a forked child, such as a worker of a data loader, which must end at SIGTERM."""
    numbers = list(_before)
    _catchers.clear()
    for number in numbers:
        _restore(number)


os.register_at_fork(after_in_child=_reset_after_fork)


@contextlib.contextmanager
def catching(settings: SignalSettings) -> Iterator[None]:
    """Record signals inside, for the feature that opens its own catcher there."""
    catcher = Catcher(_numbers(settings))
    catcher.open()
    try:
        yield
    finally:
        catcher.close()


def _numbers(settings: SignalSettings) -> tuple[int, ...]:
    return tuple(int(getattr(signal, name)) for name in settings.actions)


# -- the feature -----------------------------------------------------------------------------------


@final
class Signals(Feature):
    """Serves recorded signals at each boundary.  One all-reduce of two numbers over all ranks per step.

    Replica groups of diloco meet at the end of a round only, so signals wait for it.
    """

    run: Run
    every: int  # steps between two votes, from step `start` on; before, every step
    start: int

    def __init__(self, settings: SignalSettings, save: Save) -> None:
        self.settings = settings
        self.save = save
        self.catcher = Catcher(_numbers(settings))
        self._release: Callable[[], object] = lambda: None

    def attach(self, run: Run) -> None:
        self.run = run
        diloco = run.plan.diloco
        self.every, self.start = diloco.sync_every or 1, diloco.start_step
        self.catcher.open()
        self._release = weakref.finalize(self, Catcher.close, self.catcher)

    def step_end(self, report: StepReport) -> None:
        if max(report.step - self.start, 0) % self.every:
            return
        taken = frozenset(self.catcher.pending)
        saves, leaves = self._agree(taken)
        if not (saves or leaves):
            return
        run, settings = self.run, self.settings
        names = [signal.Signals(number).name for number in sorted(taken)]
        everyone = zcomm.all_gather_object(names, run.parts.groups.world())
        signals = tuple(f"{name} on rank {rank}" for rank, names in enumerate(everyone) for name in names)
        folder = ""
        if saves:
            folder = self.save(settings.save_dir, client_state={"signals": list(signals)})
            if leaves:
                run.parts.checkpoints.wait()
        self.catcher.pending -= taken
        if run.parts.world.rank == 0:
            done = f"saved {folder}" if saves else "nothing was saved"
            then = f"all ranks exit with code {settings.exit_code}" if leaves else "training goes on"
            log.warning("%s: %s after step %d; %s", ", ".join(signals), done, report.step, then)
        if leaves:
            raise StoppedBySignal(settings.exit_code, signals, folder)

    def close(self) -> None:
        self._release()

    def _agree(self, taken: frozenset[int]) -> tuple[bool, bool]:
        """Return whether any rank wants a checkpoint, and whether any wants to leave."""
        actions = {self.settings.actions[signal.Signals(number).name] for number in taken}
        wants = [any("checkpoint" in action for action in actions), any("exit" in action for action in actions)]
        votes = torch.tensor(wants, dtype=torch.float32, device=self.run.device)
        zcomm.all_reduce(votes, self.run.parts.groups.world(), op="max", label="signals")
        saves, leaves = votes.tolist()
        return bool(saves), bool(leaves)
