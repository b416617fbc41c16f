"""OneCycle and the learning-rate range test (Smith 2017, Smith and Topin 2018)."""

from __future__ import annotations

import warnings

import torch

from zoptim.checks import flag, integer, number
from zoptim.schedules import laws
from zoptim.schedules.base import Rate, Schedule, check_optimizer

__all__ = ["LRRangeTest", "OneCycle"]

_SECOND_BETA = 0.99  # betas[1] while momentum is cycled, as in DeepSpeed


class OneCycle(Schedule):
    """One triangle cycle_min_lr -> cycle_max_lr -> cycle_min_lr, then a decay without end.

    The rise takes cycle_first_step_size updates, the fall cycle_second_step_size (None: as many).  Each has as many
    stairs as its stair count (0: a straight line; second None: as the first).  k updates after the cycle the lr is
    cycle_min_lr / (1 + decay_lr_rate * k / decay_step_size); a decay_step_size of 0 means no decay.  With
    cycle_momentum, betas[0] of every group that has betas follows the mirrored triangle between cycle_max_mom and
    cycle_min_mom and then grows with decay_mom_rate.  Rates and momenta are one number for all groups, or one for
    each.

    As in DeepSpeed, betas[0] begins at cycle_min_mom and betas[1] becomes 0.99, with a warning if it was another
    value; `exact_peak=True` begins at cycle_max_mom and keeps betas[1]: see [Note: exact peak] in laws.py.

    Raises ValueError if decay_mom_rate lets a momentum reach 1, where Adam diverges.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: Rate,
        cycle_max_lr: Rate,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Rate = 0.8,
        cycle_max_mom: Rate = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
        *,
        exact_peak: bool = False,
    ) -> None:
        check_optimizer(optimizer)
        first = integer("cycle_first_step_size", cycle_first_step_size, 1)
        second = first if cycle_second_step_size is None else cycle_second_step_size
        stairs = integer("cycle_first_stair_count", cycle_first_stair_count)
        second_stairs = stairs if cycle_second_stair_count is None else cycle_second_stair_count
        self.sizes = (first, integer("cycle_second_step_size", second))
        self.stairs = (stairs, integer("cycle_second_stair_count", second_stairs))
        self._lr_range, self._momentum_range = (cycle_min_lr, cycle_max_lr), (cycle_min_mom, cycle_max_mom)
        self.decay_rates = (number("decay_lr_rate", decay_lr_rate, 0), number("decay_mom_rate", decay_mom_rate, 0))
        self.decay_step_size = integer("decay_step_size", decay_step_size)
        self.exact_peak = flag("exact_peak", exact_peak)
        self.cycles_momentum = flag("cycle_momentum", cycle_momentum) and _has_betas(optimizer)
        if self.cycles_momentum and not exact_peak:
            _warn_second_beta(optimizer)
        super().__init__(optimizer, last_batch_iteration)

    @property
    def min_lrs(self) -> list[float]:
        """Learning rate of each group at both ends of the cycle."""
        return self._rates("cycle_min_lr", self._lr_range[0])

    @property
    def max_lrs(self) -> list[float]:
        """Learning rate of each group at the peak."""
        return self._rates("cycle_max_lr", self._lr_range[1])

    @property
    def total_size(self) -> int:
        """Updates of the cycle; those of its rise are `first_step_size`, of its fall `second_step_size`."""
        return sum(self.sizes)

    @property
    def first_step_size(self) -> int:
        """Updates of the rise."""
        return self.sizes[0]

    @property
    def second_step_size(self) -> int:
        """Updates of the fall."""
        return self.sizes[1]

    @property
    def step_ratio(self) -> float:
        """Share of the rise in the cycle."""
        return self.sizes[0] / sum(self.sizes)

    def lrs(self, t: int) -> list[float]:
        height, decay = laws.triangle(t, *self.sizes, self.stairs), self._decay(t, self.decay_rates[0])
        return [(low + (high - low) * height) / decay for low, high in zip(self.min_lrs, self.max_lrs)]

    def momenta(self, t: int) -> list[float]:
        """Evaluate the law of betas[0], one per group.  Pure."""
        height, decay = laws.triangle(t, *self.sizes, self.stairs), self._decay(t, self.decay_rates[1])
        lows, highs = self._momentum_limits()
        return [(high - (high - low) * height) * decay for low, high in zip(lows, highs)]

    def get_mom(self) -> list[tuple[float, ...]] | None:
        """Return the law's betas of every group; None if momentum is not cycled.

        Before the first update the optimizer's betas differ, see [Note: exact peak] in laws.py.
        """
        return self._betas(self.momenta(self.last_batch_iteration)) if self.cycles_momentum else None

    def _decay(self, t: int, rate: float) -> float:
        return laws.inverse_decay(max(0, t + 1 - sum(self.sizes)), rate, self.decay_step_size)

    def _momentum_limits(self) -> tuple[list[float], list[float]]:
        low, high = self._momentum_range
        return self._per_group("cycle_min_mom", low, 1), self._per_group("cycle_max_mom", high, 1)

    def _betas(self, momenta: list[float]) -> list[tuple[float, ...]]:
        rest = [tuple(group.get("betas", ())[1:]) for group in self.optimizer.param_groups]
        return [(first, *(second if self.exact_peak else (_SECOND_BETA,))) for first, second in zip(momenta, rest)]

    def _apply(self) -> None:
        """Check first, so that an error leaves the optimizer unchanged."""
        t = self.last_batch_iteration
        begins = t < 0 and not self.exact_peak
        momenta = self._momentum_limits()[0] if begins else self.momenta(t)
        self._check_growth(momenta)
        super()._apply()
        if self.cycles_momentum:
            for group, betas in zip(self.optimizer.param_groups, self._betas(momenta)):
                if "betas" in group:
                    group["betas"] = betas

    def _check_growth(self, momenta: list[float]) -> None:
        if self.cycles_momentum and max(momenta, default=0.0) >= 1:
            raise ValueError(
                f"after {self.last_batch_iteration + 1} updates decay_mom_rate {self.decay_rates[1]:g} raised "
                f"betas[0] to {max(momenta):g}; it must stay below 1. Give a smaller decay_mom_rate, or 0."
            )


class LRRangeTest(Schedule):
    """lr_range_test_min_lr * (1 + lr_range_test_step_rate * x), x = updates / lr_range_test_step_size.

    The rate grows until training diverges, which shows the largest usable rate.  lr_range_test_staircase floors x.
    lr_range_test_min_lr: one number for all groups, or one for each.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: Rate = 1e-3,
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

    @property
    def min_lr(self) -> list[float]:
        """First learning rate of each group."""
        return self._rates("lr_range_test_min_lr", self._min_lr)

    def lrs(self, t: int) -> list[float]:
        factor = laws.range_test_factor(t, self.step_size, self.step_rate, self.staircase)
        return [low * factor for low in self.min_lr]


def _has_betas(optimizer: torch.optim.Optimizer) -> bool:
    if any("betas" in group for group in optimizer.param_groups):
        return True
    warnings.warn(
        f"cycle_momentum has no effect: {type(optimizer).__name__} has no betas. Set cycle_momentum to false.",
        stacklevel=3,
    )
    return False


def _warn_second_beta(optimizer: torch.optim.Optimizer) -> None:
    found = {group["betas"][1] for group in optimizer.param_groups if "betas" in group} - {_SECOND_BETA}
    if found:
        warnings.warn(
            f"OneCycle sets betas[1] to {_SECOND_BETA}, as in DeepSpeed; the optimizer's value, "
            f"{', '.join(map(str, found))}, has no effect. exact_peak=True keeps it, cycle_momentum=False keeps both "
            "betas.",
            stacklevel=3,
        )
