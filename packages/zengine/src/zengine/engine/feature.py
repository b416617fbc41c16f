"""Base class of features, whose hooks are identities."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from zengine.trial_load import trial_load

if TYPE_CHECKING:
    from zengine.engine.clock import MicroStep
    from zengine.engine.parts import Run
    from zengine.step_report import StepReport
    from zpartition import LazyShard, Partition, Shard


class Feature:
    """Optional behaviour of an engine: override the hooks you need.

    Each hook runs once per call of the engine's method of that name.
    """

    name: str = ""  # key of its state in checkpoints; "": no state

    def attach(self, run: Run) -> None:
        """Attach to the engine; called once, when it is complete."""

    def forward_begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for the module; called before it runs.

        In a pipeline: (inputs, labels) of each micro-batch on ranks that read data, and () once per batch on others.
        """
        return args, kwargs

    def forward_end(self, output: Any) -> Any:
        """Return the output for the caller; called after the module has run."""
        return output

    def backward_begin(self, micro: MicroStep, loss: Tensor) -> Tensor:
        """Return the loss to differentiate; called before it is divided and scaled.

        In a pipeline: called once per batch, before its first backward, with a loss of 0; the result is ignored.
        """
        return loss

    def backward_end(self, micro: MicroStep) -> None:
        """Run after a successful backward."""

    def step_begin(self) -> None:
        """Run at a boundary, before the last gradients are reduced."""

    def gradients_ready(self, partition: Partition) -> None:
        """Run at a boundary, after the reduction and before gradients are inspected.

        They still have the loss scale (and, for weighted losses, are not divided yet).  Changes affect norm and
        update, and must be the same on all ranks.  Runs once more if some gradients arrived after their bucket was
        sent (the backward of a split model differs from its first one), with all gradients and earlier changes.
        """

    def step_end(self, report: StepReport) -> None:
        """Run after a boundary, applied or skipped."""

    def checkpoint_saved(self, save_dir: str) -> None:
        """Run on each rank after `save_checkpoint`; a background save may still be writing."""

    def close(self) -> None:
        """Detach; the engine's parts still work.  Called once, on each rank that closes: no collectives."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state to save; must be JSON-able."""
        return {}

    def merge_states(self, states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return the state to save, from those of all ranks of a pipeline, rank 0's first."""
        return states[0]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""

    def tensors(self) -> Iterator[Shard | LazyShard]:
        """Yield the tensors to save, with their addresses and their names in a checkpoint."""
        return iter(())

    def tensors_to_fill(self, *, weights_only: bool) -> Iterator[Shard]:
        """Yield memory for the tensors to load, named as by `tensors`; those that a checkpoint lacks are not filled.

        Called after `prepare_load`, before anything changes.

        weights_only: counters and optimizer are not restored.
        """
        return iter(())

    def reset_tensors(self) -> None:
        """Clear the tensors that a checkpoint may lack; called before they are filled."""

    def prepare_load(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Check a state without changes; return a function that restores it and cannot fail.

        The default is a trial of `load_state_dict`, after which the previous state is restored.
        """
        return trial_load(self, state)
