"""OneCycle and the learning-rate range test (Smith 2017, Smith and Topin 2018)."""

from __future__ import annotations

import warnings

import torch

from ..checks import flag, integer, number
from . import laws
from .base import Schedule

__all__ = ["LRRangeTest", "OneCycle"]


class OneCycle(Schedule):
    """One triangle cycle_min_lr -> cycle_max_lr -> cycle_min_lr, then a decay without end.

    The rise takes cycle_first_step_size updates and the fall cycle_second_step_size (None: as many), each in
    so many stairs (0: a straight line; second None: as the first).  After the cycle, k updates later, the
    lr is cycle_min_lr / (1 + decay_lr_rate * k / decay_step_size); a decay_step_size of 0 means no decay.
    With cycle_momentum, betas[0] of every group that has betas runs the mirrored triangle between
    cycle_max_mom and cycle_min_mom, and then grows with decay_mom_rate.  As in DeepSpeed it begins at
    cycle_min_mom; `exact_peak=True` begins at cycle_max_mom: see [Note: exact peak] in laws.py.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: float,
        cycle_max_lr: float,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float = 0.8,
        cycle_max_mom: float = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
        *,
        exact_peak: bool = False,
    ) -> None:
        first = integer("cycle_first_step_size", cycle_first_step_size, 1)
        second = first if cycle_second_step_size is None else cycle_second_step_size
        stairs = integer("cycle_first_stair_count", cycle_first_stair_count)
        second_stairs = stairs if cycle_second_stair_count is None else cycle_second_stair_count
        self.sizes = (first, integer("cycle_second_step_size", second, 1))
        self.stairs = (stairs, integer("cycle_second_stair_count", second_stairs))
        self.lr_range = (number("cycle_min_lr", cycle_min_lr, 0), number("cycle_max_lr", cycle_max_lr, 0))
        self.momentum_range = (
            number("cycle_min_mom", cycle_min_mom, 0, 1),
            number("cycle_max_mom", cycle_max_mom, 0, 1),
        )
        self.decay_rates = (number("decay_lr_rate", decay_lr_rate, 0), number("decay_mom_rate", decay_mom_rate, 0))
        self.decay_step_size = integer("decay_step_size", decay_step_size)
        # betas[0] before the first update.
        self.first_momentum = self.momentum_range[1 if flag("exact_peak", exact_peak) else 0]
        self.cycles_momentum = flag("cycle_momentum", cycle_momentum) and _has_betas(optimizer)
        super().__init__(optimizer, last_batch_iteration)

    def lrs(self, t: int) -> list[float]:
        low, high = self.lr_range
        height = laws.triangle(t, *self.sizes, self.stairs)
        lr = (low + (high - low) * height) / self._decay(t, self.decay_rates[0])
        return [lr] * len(self.base_lrs)

    def momentum(self, t: int) -> float:
        """The law of betas[0].  Pure."""
        if t < 0:
            return self.first_momentum
        low, high = self.momentum_range
        height = laws.triangle(t, *self.sizes, self.stairs)
        return (high - (high - low) * height) * self._decay(t, self.decay_rates[1])

    def get_mom(self) -> list[tuple[float, ...]]:
        """betas of every group that has them, as they are now."""
        return [tuple(group["betas"]) for group in self.optimizer.param_groups if "betas" in group]

    def _decay(self, t: int, rate: float) -> float:
        return laws.inverse_decay(max(0, t + 1 - sum(self.sizes)), rate, self.decay_step_size)

    def _apply(self) -> None:
        super()._apply()
        if not self.cycles_momentum:
            return
        for group in self.optimizer.param_groups:
            if "betas" in group:
                group["betas"] = (self.momentum(self.last_batch_iteration), *group["betas"][1:])


class LRRangeTest(Schedule):
    """lr_range_test_min_lr * (1 + lr_range_test_step_rate * x), x = updates / lr_range_test_step_size.

    The rate grows until training diverges, which tells how large it may be.  lr_range_test_staircase floors x.
    lr_range_test_min_lr: one number for all groups, or one for each.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: float | list[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self._min_lr = lr_range_test_min_lr
        self.step_size = integer("lr_range_test_step_size", lr_range_test_step_size, 1)
        self.step_rate = number("lr_range_test_step_rate", lr_range_test_step_rate, 0)
        self.staircase = flag("lr_range_test_staircase", lr_range_test_staircase)
        super().__init__(optimizer, last_batch_iteration)

    def lrs(self, t: int) -> list[float]:
        factor = laws.range_test_factor(t, self.step_size, self.step_rate, self.staircase)
        return [low * factor for low in self._per_group("lr_range_test_min_lr", self._min_lr)]


def _has_betas(optimizer: torch.optim.Optimizer) -> bool:
    if any("betas" in group for group in optimizer.param_groups):
        return True
    warnings.warn(
        f"cycle_momentum has nothing to cycle: {type(optimizer).__name__} has no betas. Set cycle_momentum to false.",
        stacklevel=3,
    )
    return False
