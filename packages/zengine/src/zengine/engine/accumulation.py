"""Gradient accumulation: batch sizes, dropping a step, and the time of reduction.

Each function is the body of the engine's method of that name.  Functions that change a batch size return the `Run`
with the new plan, since plans are frozen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import attrs

from zengine.engine import torch_style
from zengine.engine.clock import CallOrderError
from zengine.engine.parts import Run

__all__ = [
    "coalesce_grad_reduction",
    "reduce_gradients",
    "restart_step",
    "with_micro_batch_size",
    "with_train_batch_size",
    "zero_grad",
]


def with_train_batch_size(run: Run, train_batch_size: int) -> Run:
    """See `DeepSpeedEngine.set_train_batch_size`."""
    batch = run.plan.batch
    per_micro_step = batch.micro_batch_size * batch.replicas
    if train_batch_size < 1 or train_batch_size % per_micro_step:
        below = max(train_batch_size // per_micro_step, 1) * per_micro_step
        raise ValueError(
            f"set_train_batch_size({train_batch_size}): one micro-step takes {per_micro_step} samples "
            f"({batch.micro_batch_size} a rank x {batch.replicas} ranks); the nearest multiples are {below} and "
            f"{below + per_micro_step}"
        )
    return _with_batch(run, train_batch_size, batch.micro_batch_size, train_batch_size // per_micro_step)


def with_micro_batch_size(run: Run, micro_batch_size: int) -> Run:
    """See `DeepSpeedEngine.set_train_micro_batch_size`."""
    if micro_batch_size < 1:
        raise ValueError(f"set_train_micro_batch_size({micro_batch_size}): pass 1 or more")
    batch = run.plan.batch
    return _with_batch(
        run, micro_batch_size * batch.accumulation * batch.replicas, micro_batch_size, batch.accumulation
    )


def _with_batch(run: Run, train: int, micro: int, accumulation: int) -> Run:
    clock, loader = run.clock, run.parts.loader
    if not clock.is_between_steps:
        raise ValueError(
            f"batch sizes change between steps; {clock.position} is running. Change them after a step() "
            "that returned a report."
        )
    if run.plan.batch.uneven:
        raise ValueError(
            f"the batch of {run.plan.batch.train_batch_size} samples is shared unevenly by {run.plan.batch.replicas} "
            "replicas and stays as it is: elasticity keeps it at every world"
        )
    batch = attrs.evolve(run.plan.batch, train_batch_size=train, micro_batch_size=micro, accumulation=accumulation)
    clock.accumulation, clock.samples_per_micro_step = accumulation, micro * batch.replicas
    if loader is not None:
        loader.set_accumulation(accumulation)
    return attrs.evolve(run, plan=attrs.evolve(run.plan, batch=batch))


def zero_grad(run: Run) -> None:
    """See `Engine.zero_grad`."""
    run.clock.finish_pending()
    if run.clock.index > 0:
        raise CallOrderError(
            f"zero_grad() {run.clock.position} would drop gradients of earlier micro-steps of this step. Leave it "
            "out: step() drops gradients after it has used them. Or call restart_step() to drop them and begin the "
            "step again."
        )
    restart_step(run)


def restart_step(run: Run) -> None:
    """See `Engine.restart_step`."""
    run.clock.finish_pending()
    run.parts.partition.zero_grad()
    run.clock.restart_step()


def reduce_gradients(run: Run) -> None:
    """See `DeepSpeedEngine.allreduce_gradients`."""
    run.clock.require_open("allreduce_gradients")
    torch_style.accept_plain_gradients(run)
    run.parts.partition.finish_gradients()


@contextmanager
def coalesce_grad_reduction(run: Run) -> Iterator[None]:
    """See `DeepSpeedEngine.coalesce_grad_reduction`."""
    with run.clock.local():
        yield
    reduce_gradients(run)
