"""Mixture of quantization (MoQ): weights are rounded to fewer and fewer bits while they are trained.

After each update every chosen weight of two or more dimensions is rounded to its present number of bits; the masters
keep full precision (zpartition's rounding.py), so the optimizer never sees the rounding.  A weight starts with
start_bits.  When `period` steps have passed since the offset, it loses a bit, and the period becomes 2 period factor:
from 8 bits, with a period of 10, bits fall after steps 10, 20, 40 and 80.

- factor is 1, or with eigenvalues 1 + floor(4 value), 1 to 5, for a weight in one of their blocks: layers in which
  the loss is curved get their next bits later (from 8 bits, with a period of 10 and a value of 1, after steps 10, 100
  and 1000).
- fp16_mixed_quantize: a weight is r w + (1 - r) rounded(w).  r is 1 at the beginning and after each lost bit of that
  weight, and falls by quantize_change_ratio a step.
- Stochastic rounding draws by (weight, step), so all ranks, stages and resumed runs draw alike.

Laws and keys are DeepSpeed's; it has them in fp16 alone, below stage 3, and with one r for all weights.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import attrs
import torch
from torch import Tensor
from torch.nn import Parameter

from zengine.engine.feature import Feature
from zengine.features.eigenvalues import Eigenvalues
from zprecision.quant import round_to_bits

if TYPE_CHECKING:
    from zengine.config.plan.moq import MoqPlan
    from zengine.engine.parts import Run, TelemetrySlot
    from zengine.step_report import StepReport
    from zpartition import Partition

log = logging.getLogger("zengine")


@final
@attrs.define
class BitSchedule:
    """Bits of one weight.

    Invariant: target <= bits, and fell_at <= the steps that `advance` has seen.
    """

    bits: int
    target: int
    period: int  # steps at which the next bit is lost
    fell_at: int = 0  # step of the last lost bit; 0: none yet

    def advance(self, steps: int, factor: int) -> bool:
        """Lose a bit if `steps` have reached the period; returns whether it did."""
        if self.bits <= self.target or steps < self.period:
            return False
        self.bits -= 1
        self.period *= 2 * factor
        self.fell_at = steps
        return True


@final
class MixtureOfQuantization(Feature):
    """Rounds weights after each applied update."""

    name = "quantize_training"

    partition: Partition
    telemetry: TelemetrySlot
    is_chief: bool
    schedules: dict[str, BitSchedule]  # by weight
    params: Mapping[str, Parameter]

    def __init__(self, plan: MoqPlan, eigenvalues: Eigenvalues | None = None) -> None:
        self.plan = plan
        self.eigenvalues = eigenvalues  # None: no factors
        self.steps = 0  # applied updates
        self.schedules = {}

    def attach(self, run: Run) -> None:
        """Choose the weights.

        Raises:
            ValueError: there is none; one has no master, or is not divisible into quantize_groups parts.
        """
        self.partition, self.telemetry = run.parts.partition, run.parts.telemetry
        self.is_chief = run.parts.world.rank == 0
        self.params = self.partition.params
        for name, param in self.params.items():
            group = self.plan.group_of(name)
            if param.dim() > 1 and group is not None:
                self._check_divisible(name, param)
                self.schedules[name] = BitSchedule(group.start_bits, group.target_bits, group.period)
        if not self.schedules and run.plan.parallel.degrees.pipeline == 1:  # a stage may have none
            raise ValueError(
                f"{self.plan.section}: none of the {len(self.params)} trained parameters is chosen: they have less "
                "than two dimensions, or names that no pattern of modules finds. Correct the patterns, or remove the "
                "section"
            )
        try:
            self.partition.round_by(self._round, self.schedules)
        except ValueError as error:
            raise ValueError(f'{self.plan.section}: {error}: "bf16": {{"enabled": true}}, or fp16') from None
        if self.eigenvalues is not None:
            self.eigenvalues.wants = self._expects_fall

    def _check_divisible(self, name: str, param: Parameter) -> None:
        if param.numel() % self.plan.num_groups:
            raise ValueError(
                f"{self.plan.section}: quantize_groups = {self.plan.num_groups} does not divide the {param.numel()} "
                f"elements of {name}, {tuple(param.shape)}. Give a divisor"
            )

    def _expects_fall(self) -> bool:
        """Return True if some weight loses a bit before eigenvalues can be computed once more."""
        assert self.eigenvalues is not None
        reach = self.steps - self.plan.offset + self.eigenvalues.plan.gas_boundary_resolution
        return any(each.bits > each.target and reach >= each.period for each in self.schedules.values())

    def _factors(self) -> Mapping[int, int]:
        """Return the factor of the period by id of a parameter, of those in blocks."""
        found = {} if self.eigenvalues is None else self.eigenvalues.by_parameter()
        return {key: 1 + int(4 * value) for key, (value, _) in found.items()}

    def step_end(self, report: StepReport) -> None:
        """Advance the schedules and round, after an applied update."""
        if not report.applied:
            return
        self.steps += 1
        steps = self.steps - self.plan.offset
        if steps <= 0:
            return
        factors = self._factors() if self._any_fall(steps) else {}
        for name, schedule in self.schedules.items():
            if schedule.advance(steps, factors.get(id(self.params[name]), 1)) and self.plan.verbose and self.is_chief:
                log.info(
                    "quantize_training: step %d: %s has %d bits until step %s",
                    *(self.steps, name, schedule.bits),
                    self.plan.offset + schedule.period if schedule.bits > schedule.target else "the last one",
                )
        self.partition.round_weights()
        if bits := [schedule.bits for schedule in self.schedules.values()]:
            self.telemetry.write_events([("data/moq_bits", sum(bits) / len(bits), report.step)])

    def _any_fall(self, steps: int) -> bool:
        return any(each.bits > each.target and steps >= each.period for each in self.schedules.values())

    def _round(self, name: str, weight: Tensor) -> None:
        """Round one whole weight in place."""
        steps = self.steps - self.plan.offset
        if steps <= 0:
            return
        schedule, plan = self.schedules[name], self.plan
        generator = None
        is_nearest = plan.rounding == "nearest" or schedule.bits < 3
        if not is_nearest:
            generator = torch.Generator(weight.device).manual_seed(zlib.crc32(f"{name} {self.steps}".encode()))
        rounded = round_to_bits(
            weight,
            schedule.bits,
            groups=plan.num_groups,
            kind=plan.kind,
            rounding="nearest" if is_nearest else "stochastic",
            generator=generator,
        )
        share = max(0.0, 1.0 - plan.change_ratio * (steps - schedule.fell_at)) if plan.change_ratio else 0.0
        weight.copy_(share * weight + (1.0 - share) * rounded if share else rounded)

    def state_dict(self) -> Mapping[str, Any]:
        weights = {name: [each.bits, each.period, each.fell_at] for name, each in self.schedules.items()}
        return {"steps": self.steps, "weights": weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.prepare_load(state)()

    def prepare_load(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Check a state; return a function that restores it.  Raises ValueError.

        Weights that it lacks (of other pipeline stages, whose state rank 0 does not have) follow the law without
        factors.
        """
        steps = state.get("steps") if isinstance(state, Mapping) else None
        weights = state.get("weights") if isinstance(state, Mapping) else None
        if type(steps) is not int or steps < 0 or not isinstance(weights, Mapping):
            raise ValueError(f"steps = {steps!r} must be a whole number >= 0, and weights a mapping")
        restored = {name: self._restored(name, steps, weights.get(name)) for name in self.schedules}

        def commit() -> None:
            self.steps = steps
            self.schedules.update(restored)

        return commit

    def _restored(self, name: str, steps: int, saved: Sequence[int] | None) -> BitSchedule:
        group = self.plan.group_of(name)
        assert group is not None
        schedule = BitSchedule(group.start_bits, group.target_bits, group.period)
        if saved is None:
            while schedule.bits > schedule.target and schedule.period <= steps - self.plan.offset:
                schedule.advance(schedule.period, 1)
            return schedule
        if not (isinstance(saved, (list, tuple)) and len(saved) == 3 and all(type(n) is int for n in saved)):
            raise ValueError(f"weights[{name!r}] = {saved!r} must be bits, period and step, whole numbers")
        schedule.bits, schedule.period, schedule.fell_at = saved
        return schedule
