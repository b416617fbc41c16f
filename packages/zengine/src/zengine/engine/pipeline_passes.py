"""Passes of a pipeline's stage: a forward and a backward, with the runner, scaler and partition of an engine.

A backward of each micro-batch is a round of the partition that sends nothing, but for the last of the batch, which
sends the sum (`ReduceAt.BATCH`).  So ranks that hold the same stage exchange gradients once a batch, at every ZeRO
stage, and never wait for each other inside of the schedule for anything but the gathers of stage 3, which they make
in one order because they carry out the same actions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, final

import attrs
from torch import Tensor
from torch.nn import Parameter

import zpartition
from zengine.engine.loss_weighting import check_loss
from zpartition.pipeline import Passes

if TYPE_CHECKING:
    from zengine.engine.parts import Parts
    from zpartition.pipeline import PipelineModule

__all__ = ["EnginePasses"]


@final
@attrs.define(eq=False)
class EnginePasses(Passes):
    """The passes of one engine."""

    parts: Parts
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext  # around the loss, as around forward
    announce: Callable[[], None] = lambda: None  # called before the first backward of a batch, and forgotten

    def forward(self, module: PipelineModule, stage: int, value: Any, around: Any) -> Any:
        """A stage, as the runner carries out a module."""
        with self.parts.telemetry.span("forward"):
            return self.parts.runner.forward(module, (value,), {"stage": stage, "around": around})

    def loss(self, loss_fn: Callable[[Any, Any], Any], output: Any, labels: Any) -> Any:
        """Inside of autocast, where forward is: losses of narrow outputs are computed in float32 there."""
        with self.autocast():
            return loss_fn(output, labels)

    def share(self, loss: Tensor, micro_batches: int) -> Tensor:
        """Divided and scaled.  Raises ValueError for a loss without a graph."""
        check_loss(loss)
        return self.parts.scaler.scale(loss / micro_batches)

    @contextmanager
    def backward(self, *, is_last: bool) -> Iterator[None]:
        """A round of the partition; the last one sends."""
        announce, self.announce = self.announce, lambda: None
        announce()
        with self.parts.telemetry.span("backward"), self.parts.partition.micro_step(is_last=is_last):
            yield

    def whole(self, params: Iterable[Parameter]) -> AbstractContextManager[Any]:
        """Gathered.  A collective of the ranks that hold the same stage."""
        return zpartition.gathered(list(params))
