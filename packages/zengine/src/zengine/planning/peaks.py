"""Peak memory of a rank: the partition plus the model's activations for a micro-batch.

    peak = states, masters, accumulators, weights, buckets, gathered units    (zpartition.plan, exact or upper bound)
         + peak activations of one micro-batch                               (a dry run)

The optimizer's step has no activations and works in place, so the peak is in backward.  Activations for each
candidate micro-batch size come from a dry run, not from a guess.  Without a GPU the CPU's kernels stand in for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

import attrs
import torch
from torch import nn

from zengine.config import Plan
from zengine.planning.activations import Activations, dry_run
from zengine.planning.sizes import Sizes, at_stage, sizes

__all__ = ["Peak", "PeakSubject", "StageFit", "best_of", "largest_micro_batch", "peak", "stages"]

_MOST = 1 << 14  # samples of a micro-batch
_GUESSES, _STEP_BACK = 3, 0.95


@final
@attrs.frozen(kw_only=True, eq=False)
class PeakSubject:
    """Model and its data.  Each micro-batch size is run dry once: activations are equal at every stage."""

    module: nn.Module  # in the plan's dtype, on any device, also meta
    batch: Callable[[int], Any]  # size of a micro-batch -> the model's argument
    device: str  # "cpu" | "cuda"
    autocast: torch.dtype = torch.float32  # of torch.autocast around forward; float32: none
    _known: dict[int, Activations] = attrs.field(factory=dict, init=False)

    def activations(self, micro_batch: int) -> Activations:
        """Return the activations of a micro-batch size."""
        if micro_batch not in self._known:
            self._known[micro_batch] = self._run_dry(micro_batch)
        return self._known[micro_batch]

    def _run_dry(self, micro_batch: int) -> Activations:
        return dry_run(self.module, lambda: self.batch(micro_batch), device=self.dry_device, autocast=self.autocast)

    @property
    def dry_device(self) -> str:
        """Device whose kernels are counted."""
        return self.device if torch.cuda.is_available() else "cpu"


@attrs.frozen(kw_only=True)
class Peak:
    """Maximum memory of one rank's device in a step, by phase."""

    plan: Plan
    micro_batch: int
    sizes: Sizes
    activations: Activations
    is_approximate: bool = False  # no GPU here: the CPU's kernels stand in for its own

    @property
    def between_steps(self) -> int:
        """Bytes held between steps."""
        return self.sizes.memory.model_states_bytes + self.sizes.memory.secondary_shards

    @property
    def forward(self) -> int:
        """Upper bound until the loss exists."""
        return self.sizes.memory.total_bytes + self.activations.forward

    @property
    def backward(self) -> int:
        """Upper bound until the gradients exist."""
        return self.sizes.memory.total_bytes + self.activations.backward

    @property
    def total(self) -> int:
        """Maximum over all phases."""
        return max(self.forward, self.backward)


@attrs.frozen(kw_only=True)
class StageFit:
    """Largest fit at one stage."""

    stage: int
    largest: int  # samples of a micro-batch; 0: none
    peak: Peak | None  # with the largest micro-batch that divides the batch; None where none fits


def peak(subject: PeakSubject, plan: Plan, micro_batch: int, world_size: int) -> Peak:
    """Return the peak of a rank for a micro-batch size."""
    return Peak(
        plan=plan,
        micro_batch=micro_batch,
        sizes=sizes(subject.module, plan, world_size=world_size, device=subject.device),
        activations=subject.activations(micro_batch),
        is_approximate=subject.dry_device != subject.device,
    )


def largest_micro_batch(subject: PeakSubject, plan: Plan, world_size: int, room_bytes: int) -> int:
    """Return the largest micro-batch whose peak fits, to 5%; 0 if not even one sample fits.

    Memory grows almost linearly with the samples: two sizes give a guess, and a guess counts once its dry run fits.
    """
    own = sizes(subject.module, plan, world_size=world_size, device=subject.device)
    room = room_bytes - own.memory.total_bytes
    best, known = (1, 2) if subject.activations(1).peak <= room else (0, 0)
    for _ in range(_GUESSES if best else 0):
        low, high = sorted((best, known))
        growth = (subject.activations(high).peak - subject.activations(low).peak) / (high - low)
        guess = min(_MOST, best + int((room - subject.activations(best).peak) / max(growth, 1)))
        while guess > best and subject.activations(guess).peak > room:
            guess = max(best, min(guess - 1, int(guess * _STEP_BACK)))
        if guess == best:
            break
        best, known = guess, best
    return best


def stages(subject: PeakSubject, plan: Plan, world_size: int, room_bytes: int) -> Iterator[StageFit]:
    """Return the largest micro-batch at each stage, and the peak with one that keeps the plan's batch size."""
    share = plan.batch.train_batch_size // plan.batch.replicas
    for stage in range(4 if world_size > 1 else 1):
        found = StageFit(stage=stage, largest=0, peak=None)
        for accumulation in (1, 2):  # buffers differ between one micro-step and several, and no further
            other = _with_batch(at_stage(plan, stage), share, accumulation)
            largest = largest_micro_batch(subject, other, world_size, room_bytes)
            micro = _divisor_below(share, largest if accumulation > 1 or largest >= share else 0)
            found = attrs.evolve(found, largest=max(found.largest, largest))
            if micro:
                fitted = _with_batch(other, micro, share // micro)
                yield attrs.evolve(found, peak=peak(subject, fitted, micro, world_size))
                break
        else:
            yield found


def _with_batch(plan: Plan, micro_batch: int, accumulation: int) -> Plan:
    total = micro_batch * accumulation * plan.batch.replicas
    batch = attrs.evolve(plan.batch, train_batch_size=total, micro_batch_size=micro_batch, accumulation=accumulation)
    return attrs.evolve(plan, batch=batch)


def best_of(found: Iterable[StageFit]) -> tuple[int, Peak] | None:
    """Return the stage with the least traffic per step of the same batch; the lowest of equals."""
    fitting = [(each.stage, each.peak) for each in found if each.peak is not None]
    return min(fitting, key=lambda pair: (pair[1].sizes.traffic.total_bytes, pair[0]), default=None)


def _divisor_below(number: int, most: int) -> int:
    """Return the largest divisor of `number` that is at most `most`; 0 if there is none."""
    return next((size for size in range(min(number, most), 0, -1) if number % size == 0), 0)
