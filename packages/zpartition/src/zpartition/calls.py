"""Calls that hold units: modules that run, state dicts that are under way.

Problem.  Hooks tell when a call begins and when it ends, but not every end is told: torch leaves out the hooks after
a forward on Ctrl-C, and those after a state dict when anything was raised inside.  A unit that such a call held would
stay whole for ever, and the next call would believe itself inside of one that is long over.

Design.  A call remembers the Python frame that runs it.  Where nothing ought to be running (the root module begins,
a backward begins, a block of `gathered`, a state dict), `sweep` looks for the frame on the stacks of all threads; a
call whose frame has gone is over, and what was written into its units is lost.  When a call ends, those that began
inside of it are over too.

Rejected.  Waiting for the frame to be freed (a traceback keeps it alive, in a notebook for ever); replacing `forward`
by a function with a `finally` (it would stay on the user's modules, and in copies of them).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, final

import attrs
from torch import nn

from zpartition.residence import Residence, Unit

__all__ = ["Calls", "Hook", "running_frame"]

_MODULE_FILE = nn.Module.state_dict.__code__.co_filename


@final
@attrs.define(eq=False)
class Call:
    """One of them."""

    owner: nn.Module
    frame: FrameType | None  # of an outermost call; None: not known, taken as running
    saving: AbstractContextManager[object] | None  # what is done with saved tensors meanwhile, if it began here
    units: list[Unit] = attrs.field(factory=list)  # held until it ends


@final
@attrs.define(eq=False)
class Calls:
    """A stack of calls, the innermost last.

    Invariant: the `depth` of a unit counts the calls that hold it, and the blocks of `gathered`.
    """

    residence: Residence
    exact: bool = False  # whether they are for people, who are to see the truth
    open: list[Call] = attrs.field(factory=list)

    def begin(
        self, owner: nn.Module, function: str, saving: AbstractContextManager[object] | None, units: Iterable[Unit]
    ) -> None:
        """`owner` begins to run `function` (a name in torch's module.py), and needs `units`."""
        self.open.append(Call(owner, None if self.open else running_frame(function), saving))
        for unit in units:
            self.hold(unit)

    def hold(self, unit: Unit) -> None:
        """The innermost call needs `unit` whole until it ends."""
        unit.depth += 1
        self.open[-1].units.append(unit)
        self.residence.use(unit, exact=self.exact)

    def innermost(self, owner: nn.Module) -> Call | None:
        """The call of `owner` that is about to end, if it has begun; those inside of it are over."""
        if not any(call.owner is owner for call in self.open):
            return None
        while self.open[-1].owner is not owner:
            self._abandon(self.open.pop())
        return self.open[-1]

    def end(self) -> None:
        """The innermost call ends."""
        call = self.open.pop()
        _stop_saving(call)
        for unit in call.units:
            if unit.depth:  # all are dropped after an exception in a backward
                unit.depth -= 1
                self.residence.leave(unit)

    def sweep(self) -> None:
        """Forget calls that are over although nobody said so."""
        if self.open and not _is_running(self.open[0].frame):
            while self.open:
                self._abandon(self.open.pop())

    def reset(self) -> None:
        """After an exception: nothing is running, and the residence drops all units."""
        while self.open:
            _stop_saving(self.open.pop())

    def _abandon(self, call: Call) -> None:
        """End a call that failed: its units show whatever was written into them, so they are gathered anew."""
        _stop_saving(call)
        for unit in call.units:
            unit.depth = max(0, unit.depth - 1)
            if not unit.depth:
                self.residence.drop(unit)


@final
@attrs.define(eq=False, slots=False)  # torch leaves a mark on the hooks of state dicts
class Hook:
    """A hook on one module of a partition's, which does nothing in a copy of that module."""

    function: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def __deepcopy__(self, _memo: Any) -> Callable[..., None]:
        return _nothing


def _nothing(*_: Any) -> None:
    """What a copy of a module has in place of a hook."""


def running_frame(function: str) -> FrameType | None:
    """The innermost running frame of `function` in torch's module.py."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_name, frame.f_code.co_filename) != (function, _MODULE_FILE):
        frame = frame.f_back
    return frame


def _is_running(wanted: FrameType | None) -> bool:
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            if frame is wanted:
                return True
            frame = frame.f_back
    return wanted is None


def _stop_saving(call: Call) -> None:
    if call.saving is not None:
        call.saving.__exit__(None, None, None)
