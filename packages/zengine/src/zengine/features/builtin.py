"""Small features: expert balancing, background saves, marks of the loader, dump_state, Python's garbage collector,
unfreezing, a check of uneven shares.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import nn
from torch.distributed import ProcessGroup

from zengine.data.tree import iter_tensors
from zengine.engine.feature import Feature
from zengine.imports import is_imported

if TYPE_CHECKING:
    from zengine.data.loaders.base import Loader
    from zengine.data.order.uneven import UnevenStep
    from zengine.engine.clock import Clock
    from zengine.engine.parts import CheckpointSlot, Run
    from zengine.step_report import StepReport
    from zpartition import Partition
    from zpartition.experts import Router

log = logging.getLogger("zengine")


@final
class Balancing(Feature):
    """Updates the balancing biases of `routers` after each step, by the tokens that each expert received.

    One all-reduce over the ranks that sum gradients.
    """

    group: ProcessGroup | None

    def __init__(self, routers: Sequence[Router]) -> None:
        self.routers = routers

    def attach(self, run: Run) -> None:
        self.group = run.parts.groups.gradient()

    def step_end(self, report: StepReport) -> None:
        from zpartition.experts import balance

        balance(self.routers, self.group)


def balancing_features(module: nn.Module) -> tuple[Feature, ...]:
    """Return the balancing feature for `module`; empty if none of its routers has a balancing bias."""
    if not is_imported("zpartition.experts"):
        return ()
    from zpartition.experts import balanced_routers

    routers = balanced_routers(module)
    return (Balancing(routers),) if routers else ()


@final
class GradientErrors(Feature):
    """Keeps the errors that quantized gradients feed back in the units of the gradients: see zcomm.ErrorFeedback.

    They are not saved: they belong to one rank's messages, whose number and content follow from the world.
    """

    run: Run

    def attach(self, run: Run) -> None:
        self.run = run

    def step_end(self, report: StepReport) -> None:
        """Follow the loss scale, which the messages of the next step carry."""
        if not self.run.plan.scales_losses:
            return
        scale = float(self.run.parts.scaler.factor)
        if scale != report.loss_scale:
            for errors in self.run.parts.partition.gradient_errors():
                errors.scale(scale / report.loss_scale)

    def reset_tensors(self) -> None:
        """Clear the errors of other weights."""
        if self.run.parts.world.rank == 0:
            log.info("zeropp_loco_param: a checkpoint has no errors of quantized gradients; they begin at zero")
        for errors in self.run.parts.partition.gradient_errors():
            errors.reset()


@final
class UnevenRows(Feature):
    """Checks that each batch has the samples of this rank's share of an uneven step (data/order/uneven.py)."""

    clock: Clock
    rank: int  # among the replicas

    def __init__(self, step: UnevenStep) -> None:
        self.step = step

    def attach(self, run: Run) -> None:
        self.clock, self.rank = run.clock, run.parts.groups.get_data_parallel_rank()

    def forward_begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Raise ValueError if no tensor has as many samples in its first or second dimension; not in evaluation."""
        index = min(self.clock.index, self.step.accumulation - 1)
        expected = max(1, len(self.step.share(index, self.rank)))
        shapes = [tuple(tensor.shape) for tensor in iter_tensors((args, kwargs))]
        if torch.is_grad_enabled() and shapes and not any(expected in shape[:2] for shape in shapes):
            raise ValueError(
                f"forward() {self.clock.position} got tensors of shapes {', '.join(map(str, shapes[:3]))}, and this "
                f"rank's share of the batch of {self.step.batch} samples there has {expected}: "
                f"{self.step.world_size} replicas do not divide it. Take batches from the loader of "
                "initialize(training_data=...), or start a number of replicas that divides it"
            )
        return args, kwargs


@final
class BackgroundSaves(Feature):
    """Raises the error of a background save at the next boundary, before anything is updated."""

    checkpoints: CheckpointSlot

    def attach(self, run: Run) -> None:
        self.checkpoints = run.parts.checkpoints

    def step_begin(self) -> None:
        self.checkpoints.check()


@final
class LoaderMarks(Feature):
    """Marks the position of the engine's loader at each boundary, for a save within the next step."""

    loader: Loader

    def attach(self, run: Run) -> None:
        self.loader = run.parts.loader

    def step_end(self, report: StepReport) -> None:
        self.loader.mark()


@final
class DumpState(Feature):
    """Prints the resolved plan with origins, and the bytes by owner, on rank 0 (`dump_state`)."""

    def attach(self, run: Run) -> None:
        if run.parts.world.rank != 0:
            return
        print(run.plan.describe())
        for owner, num_bytes in run.parts.partition.ledger().items():
            print(f"{owner}: {num_bytes / 2**20:,.1f} MiB on rank 0")


class PythonGC(Feature):
    """Disables Python's cyclic garbage collector until the last engine closes ("disable_python_gc").

    A full collection visits every object of the process, which takes tens of milliseconds in a large program; each
    rank pauses at another time, and all others wait for it.  Reference counting frees the objects of a step; the
    remaining cycles are freed by `engine.collect_python_gc()`, called on all ranks after an evaluation or a
    checkpoint.

    The collector belongs to the process, so engines are counted: it is enabled again when the last engine that
    disabled it is closed or deleted.
    """

    _holders: ClassVar[set[object]] = set()  # a token of each open engine

    def __init__(self) -> None:
        self._release: Callable[[], object] = lambda: None

    def attach(self, run: Run) -> None:
        """Disable the collector, unless the caller has disabled it."""
        if gc.isenabled() or self._holders:
            token = object()
            self._holders.add(token)
            gc.disable()
            self._release = weakref.finalize(self, _release, self._holders, token)

    def close(self) -> None:
        """Enable the collector if this is the last engine."""
        self._release()


def _release(holders: set[object], token: object) -> None:
    holders.discard(token)
    if not holders:
        gc.enable()


@final
class Unfreezing(Feature):
    """Checks before each forward if frozen parameters require gradients now, and trains them from then on."""

    partition: Partition

    def attach(self, run: Run) -> None:
        self.partition = run.parts.partition

    def forward_begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if torch.is_grad_enabled():
            self.partition.admit_unfrozen()
        return args, kwargs
