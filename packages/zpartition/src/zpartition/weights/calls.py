"""Active calls: running modules, and state dicts in progress, that hold units.

Problem.  Hooks report when a call begins and ends, but not every end: torch skips forward hooks after Ctrl-C, and
state-dict hooks after an exception.  A unit held by such a call would stay unsharded forever, and the next call would
look nested in one that is long over.

Design.  A call stores the Python frame that runs it.  Where no call should be active (the root module begins, a
backward begins, a `gathered` block, a state dict), `drop_finished` searches the stacks of all threads for the frame;
a call without its frame is over, and writes into its units are lost.  When a call ends, the calls that began inside
of it are over, too.

Rejected.  Waiting for the frame to be freed (a traceback keeps it alive, in a notebook forever); replacing `forward`
by a function with a `finally` (it would stay on the user's modules, and on copies of them).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, final

import attrs
from torch import nn

from zpartition.weights.unshard import Unit, Unsharder

__all__ = ["ActiveCalls", "ModuleHook", "asks_for_names", "running_frame"]

_MODULE_FILE = nn.Module.state_dict.__code__.co_filename


@final
@attrs.define(eq=False)
class ActiveCall:
    """One call."""

    owner: nn.Module
    frame: FrameType | None  # of an outermost call; None: not known, taken as running
    saving: AbstractContextManager[object] | None  # saved-tensor hooks that this call has entered
    units: list[Unit] = attrs.field(factory=list)  # held until it ends


@final
@attrs.define(eq=False)
class ActiveCalls:
    """A stack of calls, the innermost last.

    Invariant: the `depth` of a unit counts the calls, and the `gathered` blocks, that hold it.
    """

    unsharder: Unsharder
    exact: bool = False  # whether calls see exact weights (state dicts)
    open: list[ActiveCall] = attrs.field(factory=list)

    def begin(
        self, owner: nn.Module, function: str, saving: AbstractContextManager[object] | None, units: Iterable[Unit]
    ) -> ActiveCall:
        """Push the call of `function` (a name in torch's module.py) on `owner`, which needs `units`; return it."""
        call = ActiveCall(owner, None if self.open else running_frame(function), saving)
        self.open.append(call)
        for unit in units:
            self.hold(unit)
        return call

    def hold(self, unit: Unit) -> None:
        """Keep `unit` unsharded until the innermost call ends."""
        unit.depth += 1
        self.open[-1].units.append(unit)
        self.unsharder.unshard(unit, exact=self.exact)

    def innermost(self, owner: nn.Module) -> ActiveCall | None:
        """Return the call of `owner` that is about to end, if it has begun; drops calls inside of it."""
        if not any(call.owner is owner for call in self.open):
            return None
        while self.open[-1].owner is not owner:
            self._abandon(self.open.pop())
        return self.open[-1]

    def end(self) -> None:
        """Pop the innermost call."""
        call = self.open.pop()
        _stop_saving(call)
        for unit in call.units:
            if unit.depth:  # 0 after an exception in a backward, which drops all units
                unit.depth -= 1
                self.unsharder.reshard(unit, exact=self.exact)

    def end_until(self, call: ActiveCall) -> None:
        """Pop `call`, if it is still open, and the calls inside of it, which are over."""
        if any(each is call for each in self.open):
            while self.open[-1] is not call:
                self._abandon(self.open.pop())
            self.end()

    def drop_finished(self) -> None:
        """Drop calls that are over without a hook."""
        if self.open and not _is_running(self.open[0].frame):
            while self.open:
                self._abandon(self.open.pop())

    def reset(self) -> None:
        """Drop all calls after an exception; the unsharder drops all units."""
        while self.open:
            _stop_saving(self.open.pop())

    def _abandon(self, call: ActiveCall) -> None:
        """End a call that failed: its units may hold stray writes, so they are gathered again."""
        _stop_saving(call)
        for unit in call.units:
            unit.depth = max(0, unit.depth - 1)
            if not unit.depth:
                self.unsharder.drop(unit)


@final
@attrs.define(eq=False, slots=False)  # torch sets an attribute on hooks of state dicts
class ModuleHook:
    """A hook on one module of a partition, which does nothing in a copy of that module."""

    function: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def __deepcopy__(self, _memo: Any) -> Callable[..., None]:
        return _nothing


def _nothing(*_: Any) -> None:
    """Replace a hook in a copy of a module."""


def running_frame(function: str) -> FrameType | None:
    """Return the innermost running frame of `function` in torch's module.py."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_name, frame.f_code.co_filename) != (function, _MODULE_FILE):
        frame = frame.f_back
    return frame


def asks_for_names() -> bool:
    """Return whether the running `state_dict()` is one of which PEFT reads the names alone.

    Its wrappers of modules that are trained whole pick weights out of a state dict that the ranks have gathered, and
    they do so on one rank, where a gather would wait for ever.
    """
    frame = running_frame("state_dict")
    while frame is not None and frame.f_code.co_filename == _MODULE_FILE:
        frame = frame.f_back
    if frame is None or frame.f_code.co_name not in ("adapter_state_dict", "adapter_state_dict_load_map"):
        return False
    return str(frame.f_globals.get("__name__", "")).startswith("peft.")


def _is_running(wanted: FrameType | None) -> bool:
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            if frame is wanted:
                return True
            frame = frame.f_back
    return wanted is None


def _stop_saving(call: ActiveCall) -> None:
    if call.saving is not None:
        call.saving.__exit__(None, None, None)
