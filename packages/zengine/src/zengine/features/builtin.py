"""Routers that balance their experts by a bias learn, once a step, how many tokens each expert was sent."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import nn
from torch.distributed import ProcessGroup

from zengine.engine.feature import Feature
from zengine.imports import is_imported

if TYPE_CHECKING:
    from zengine.engine.parts import CheckpointSlot, Run
    from zengine.step_report import StepReport
    from zpartition import Partition
    from zpartition.experts import Router


@final
class Balancing(Feature):
    """Moves the biases of `routers` after each step, in one message of the ranks that sum gradients."""

    group: ProcessGroup | None

    def __init__(self, routers: Sequence[Router]) -> None:
        self.routers = routers

    def attach(self, run: Run) -> None:
        self.group = run.parts.groups.gradient()

    def step_end(self, report: StepReport) -> None:
        from zpartition.experts import balance

        balance(self.routers, self.group)


def balancing(module: nn.Module) -> tuple[Feature, ...]:
    """Return the feature for `module`; nothing if no router of it is balanced by a bias."""
    if not is_imported("zpartition.experts"):
        return ()
    from zpartition.experts import balanced_routers

    routers = balanced_routers(module)
    return (Balancing(routers),) if routers else ()


# A save that failed behind the loop's back is told at the next boundary.


@final
class BackgroundSaves(Feature):
    """Raises the error of a background save at the next boundary, before anything is updated."""

    checkpoints: CheckpointSlot

    def attach(self, run: Run) -> None:
        self.checkpoints = run.parts.checkpoints

    def step_begin(self) -> None:
        self.checkpoints.check()


# `dump_state`: print at start what the engine is going to do.


@final
class DumpState(Feature):
    """Prints the resolved plan with origins, and the bytes by owner; on rank 0."""

    def attach(self, run: Run) -> None:
        if run.parts.world.rank != 0:
            return
        print(run.plan.describe())
        for owner, num_bytes in run.parts.partition.ledger().items():
            print(f"{owner}: {num_bytes / 2**20:,.1f} MiB on rank 0")


# Python's cyclic garbage collector, off while the engine lives ("disable_python_gc").
#
# A full collection walks every object of the process, tens of milliseconds in a large program, and on many ranks each
# has its pause at another moment, for which all others wait.  Reference counts free what a step makes; what is left
# are cycles, which `engine.collect_python_gc()` frees when the caller has time: after an evaluation or a checkpoint,
# on all ranks.
#
# The collector is one for the whole process, so engines count: it comes back when the last one that wanted it off is
# closed, or dropped without that.


class PythonGC(Feature):
    """Disables Python's garbage collector until the last engine closes."""

    _holders: ClassVar[set[object]] = set()  # a token of each engine that is open

    def __init__(self) -> None:
        self._let_go: Callable[[], object] = lambda: None

    def attach(self, run: Run) -> None:
        """From now on nothing is collected by itself.  A collector that the caller switched off stays off."""
        if gc.isenabled() or self._holders:
            token = object()
            self._holders.add(token)
            gc.disable()
            self._let_go = weakref.finalize(self, _let_go, self._holders, token)

    def close(self) -> None:
        """The last one switches it on again."""
        self._let_go()


def _let_go(holders: set[object], token: object) -> None:
    holders.discard(token)
    if not holders:
        gc.enable()


# Parameters that are unfrozen between two steps are trained from the next forward pass on.


@final
class Unfreezing(Feature):
    """Checks before each forward whether a frozen parameter requires a gradient now."""

    partition: Partition

    def attach(self, run: Run) -> None:
        self.partition = run.parts.partition

    def forward_begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if torch.is_grad_enabled():
            self.partition.admit_unfrozen()
        return args, kwargs
