"""The rule of 0/1 Adam as pure functions, see onebit.py.

Two intervals grow.  Second moments are updated, from gradients in full precision, ever more rarely; at other steps
gradients are sent in one bit an element and only first moments move.  After `var_freeze_step` ranks update their
weights by themselves, and synchronize what they did ever more rarely.  `ZeroOneClock` is the law of both.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from zoptim.rules.onebit import Mean, variance_floor

__all__ = ["ZeroOneClock", "ZeroOneMoments", "ZeroOnePolicy", "zero_one_adam_rule"]


@attrs.frozen(kw_only=True)
class ZeroOnePolicy:
    """When second moments are updated, and when ranks synchronize (Lu et al. 2022, section 6)."""

    var_freeze_step: int = 100_000  # second moments are frozen after the next step
    var_update_scaler: int = 16  # updates of second moments before their interval doubles
    local_step_scaler: int = 32_678  # local steps before their interval doubles
    local_step_clipper: int = 16  # the longest interval of local steps


@attrs.frozen(kw_only=True)
class ZeroOneClock:
    """Number of steps so far, and the two intervals."""

    step: int = 0
    frozen: bool = False  # second moments; steps are local
    var_interval: int = 1
    var_counter: int = 0  # updates of second moments since their interval has doubled
    local_interval: int = 1
    local_counter: int = 0  # local steps since their interval has doubled

    @property
    def next_updates_variance(self) -> bool:
        """Return whether the next step takes gradients that are exact means over ranks."""
        return not self.frozen and (self.step + 1) % self.var_interval == 0

    @property
    def next_synchronizes(self) -> bool:
        """Return whether the next local step ends with a synchronization."""
        return self.frozen and (self.step + 1) % self.local_interval == 0

    def after_step(self, policy: ZeroOnePolicy) -> ZeroOneClock:
        """Return the clock after the next step; the check of `var_freeze_step` follows the step, as in DeepSpeed."""
        step = self.step + 1
        if self.frozen:
            return self._after_local(step, policy)
        interval, counter = self.var_interval, self.var_counter + self.next_updates_variance
        if counter == policy.var_update_scaler:
            interval, counter = 2 * interval, 0
        return attrs.evolve(
            self, step=step, frozen=step > policy.var_freeze_step, var_interval=interval, var_counter=counter
        )

    def _after_local(self, step: int, policy: ZeroOnePolicy) -> ZeroOneClock:
        interval, counter = self.local_interval, self.local_counter + 1
        if counter == policy.local_step_scaler:
            interval, counter = min(policy.local_step_clipper, 2 * interval), 0
        return attrs.evolve(self, step=step, local_interval=interval, local_counter=counter)


@attrs.frozen(eq=False, kw_only=True)
class ZeroOneMoments:
    """The state of 0/1 Adam for one tensor, all of the parameter's shape; and the rates of its local steps."""

    exp_avg: Tensor  # running mean of the gradient
    exp_avg_sq: Tensor  # running mean of its square
    accumulator: Tensor  # change of the weights since the last synchronization
    rates: float = 0.0  # sum of learning rates since then

    @classmethod
    def zeros(cls, param: Tensor) -> ZeroOneMoments:
        """Return the state before the first update of `param`."""
        zero = torch.zeros_like(param)
        return cls(exp_avg=zero, exp_avg_sq=zero, accumulator=zero)


def zero_one_adam_rule(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    moments: Sequence[ZeroOneMoments],
    clock: ZeroOneClock,
    policy: ZeroOnePolicy,
    *,
    mean: Mean,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> tuple[list[Tensor], list[ZeroOneMoments], ZeroOneClock]:
    """0/1 Adam (Lu et al. 2022, algorithm 1): return the new parameters, moments and clock.

    grads: means over ranks if `clock.next_updates_variance`, else this rank's own.
    """
    beta1, beta2 = betas
    exact, synchronizes, local = clock.next_updates_variance, clock.next_synchronizes, clock.frozen
    if not exact and not local:
        grads = mean(list(grads))
    first = [beta1 * each.exp_avg + (1 - beta1) * grad for each, grad in zip(moments, grads)]
    second = [
        beta2 * each.exp_avg_sq + (1 - beta2) * grad * grad if exact else each.exp_avg_sq
        for each, grad in zip(moments, grads)
    ]
    roots = [square.sqrt() + eps for square in second]
    changes = [-lr * (m / root + weight_decay * p) for p, m, root in zip(params, first, roots)]
    new = [param + change for param, change in zip(params, changes)]
    after = [attrs.evolve(each, exp_avg=m, exp_avg_sq=v) for each, m, v in zip(moments, first, second)]
    if local:
        after = [
            attrs.evolve(each, accumulator=each.accumulator + change, rates=each.rates + lr)
            for each, change in zip(after, changes)
        ]
    if synchronizes:
        sums = mean([each.accumulator * root for each, root in zip(after, roots)])
        new = [p - each.accumulator + total / root for p, each, total, root in zip(new, after, sums, roots)]
        after = [
            attrs.evolve(each, exp_avg=-total / each.rates, accumulator=torch.zeros_like(total), rates=0.0)
            for each, total in zip(after, sums)
        ]
    clock_after = clock.after_step(policy)
    if clock_after.frozen and not local:
        after = [
            attrs.evolve(each, exp_avg_sq=each.exp_avg_sq.clamp(min=variance_floor(each.exp_avg_sq)))
            for each in after
        ]
    return new, after, clock_after
