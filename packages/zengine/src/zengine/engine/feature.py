"""The identity feature: every hook returns what it was given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from zengine.rehearse import rehearsed

if TYPE_CHECKING:
    from zengine.engine.clock import MicroStep
    from zengine.engine.parts import Run
    from zengine.step_report import StepReport
    from zpartition import Partition


class Feature:
    """Override what you need; each hook runs once per call of the engine's method of that name."""

    name: str = ""  # key of its state in checkpoints; "" means that it has none

    def attach(self, run: Run) -> None:
        """Hook in; called once, when the engine is complete."""

    def forward_begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Before the module runs; returns the arguments it shall get.

        In a pipeline these are (inputs, labels) of a micro-batch where one is read, and once a batch () elsewhere.
        """
        return args, kwargs

    def forward_end(self, output: Any) -> Any:
        """After the module ran; returns what the caller shall get."""
        return output

    def backward_begin(self, micro: MicroStep, loss: Tensor) -> Tensor:
        """Before the loss is divided and scaled; returns the loss to differentiate.

        In a pipeline this is once a batch, before its first backward, and the loss is a 0 that nobody looks at again.
        """
        return loss

    def backward_end(self, micro: MicroStep) -> None:
        """After a backward that has ended well."""

    def step_begin(self) -> None:
        """At a boundary, before the last gradients are reduced."""

    def gradients_ready(self, partition: Partition) -> None:
        """At a boundary, after the reduction and before gradients are inspected and judged.

        They still carry the loss scale (and, for weighted losses, are not divided yet).  What is read is what the
        norm will be of; whoever changes them changes the step, and has to do so on all ranks alike.
        """

    def step_end(self, report: StepReport) -> None:
        """After a boundary, applied or skipped."""

    def close(self) -> None:
        """The engine is closed; its parts still work.  Called once, on every rank that closes: no collectives."""

    def state_dict(self) -> Mapping[str, Any]:
        """JSON-able state to save."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""

    def prepare_load(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Check a state and change nothing; the result restores it and cannot fail.

        This one tries `load_state_dict` and puts back what was there.
        """
        return rehearsed(self, state)
