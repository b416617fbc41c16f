"""How a step is made up of micro-steps: who decides about boundaries, and when gradients are reduced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import attrs

from zengine.clock import Boundary, CallOrderError, Clock, MicroStep, Sync

if TYPE_CHECKING:
    from zengine.config import Plan
    from zengine.parts import Parts


class EngineAccumulation:
    """Boundaries, batch sizes and the moment of reduction; mixed into `Engine`."""

    if TYPE_CHECKING:
        parts: Parts
        plan: Plan
        clock: Clock

    # -- where a step ends -----------------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step` updates the weights."""
        return self.clock.at_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decide yourself whether the next `step` updates the weights (until the decision is changed)."""
        self.clock.boundary = Boundary.FORCED if is_boundary else Boundary.WITHHELD

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Another number of samples a step from the next one on: changes the accumulation alone.

        Raises:
            ValueError: not a multiple of what all ranks take in one micro-step; or in the middle of a step.
        """
        batch = self.plan.batch
        per_micro_step = batch.micro_batch_size * batch.replicas
        if train_batch_size < 1 or train_batch_size % per_micro_step:
            below = max(train_batch_size // per_micro_step, 1) * per_micro_step
            raise ValueError(
                f"set_train_batch_size({train_batch_size}): one micro-step takes {per_micro_step} samples "
                f"({batch.micro_batch_size} a rank x {batch.replicas} ranks); the nearest multiples are {below} and "
                f"{below + per_micro_step}"
            )
        self._set_batch(train_batch_size, batch.micro_batch_size, train_batch_size // per_micro_step)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Another number of samples a forward from the next step on; the accumulation stays.

        It is what the engine counts: batches of that size have to come from your own loader, or from a new
        `deepspeed_io`.

        Raises:
            ValueError: less than 1; or in the middle of a step.
        """
        if micro_batch_size < 1:
            raise ValueError(f"set_train_micro_batch_size({micro_batch_size}): give 1 or more")
        accumulation = self.plan.batch.accumulation
        train = micro_batch_size * accumulation * self.plan.batch.replicas
        self._set_batch(train, micro_batch_size, accumulation)

    def _set_batch(self, train: int, micro: int, accumulation: int) -> None:
        if not self.clock.is_between_steps:
            raise ValueError(
                f"batch sizes change between steps; {self.clock.position} is under way. Change them after a step() "
                "that returned a report."
            )
        batch = attrs.evolve(
            self.plan.batch, train_batch_size=train, micro_batch_size=micro, accumulation=accumulation
        )
        self.plan = attrs.evolve(self.plan, batch=batch)
        self.clock.accumulation, self.clock.samples_per_micro_step = accumulation, micro * batch.replicas
        if self.parts.loader is not None:
            self.parts.loader.set_accumulation(accumulation)

    # -- dropping a step -------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that came from elsewhere (another engine's backward); `step` drops its own by itself.

        Raises:
            CallOrderError: in the middle of a step, whose earlier micro-steps would count and be lost.
        """
        self.clock.settle()
        if self.clock.index > 0:
            raise CallOrderError(
                f"zero_grad() {self.clock.position} would drop the gradients of micro-steps that the step still "
                "counts. Leave it out: step() drops gradients when it has used them. Or call restart_step() to drop "
                "them and begin the step again."
            )
        self.restart_step()

    def restart_step(self) -> None:
        """Drop the gradients of the step so far and begin it again; on all ranks alike."""
        self.clock.settle()
        self.parts.partition.zero_grad()
        self.clock.restart_step()

    # -- when gradients are reduced --------------------------------------------------------------

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, backwards send nothing: gradients add up on this rank, and the next backward outside, or `step`,
        sends their sum.  At every stage; on all ranks alike.

        It costs a whole gradient in the parameters' dtype on each rank, at stages 2 and 3 too, which otherwise keep
        a part; and the sum over micro-steps is rounded to that dtype.  A boundary inside is refused by `step`.
        """
        return self.clock.local()

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Around several backwards: one reduction at the end, of their sum.  Costs what `no_sync` costs."""
        with self.clock.local():
            yield
        self.allreduce_gradients()

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Reduce now what is still of this rank alone (after `no_sync`, or of a plain backward).  All ranks.

        bucket_size: DeepSpeed's; the buckets are those of the partition.
        """
        self.clock.require_open("allreduce_gradients")
        self.parts.partition.finish_gradients()

    def reducing(self, micro: MicroStep, *, is_weighted: bool = False) -> AbstractContextManager[None]:
        """Around the backward of `micro`: what becomes of its gradients."""
        return self.parts.partition.micro_step(
            is_last=micro.is_last,
            is_local=micro.sync is Sync.LOCAL,
            is_scaled=is_weighted or self.plan.scales_losses,
        )
