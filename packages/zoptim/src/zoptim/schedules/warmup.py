"""Warm-up schedules, followed by a constant rate, a linear decay or a cosine decay."""

from __future__ import annotations

import warnings

import torch

from zoptim.checks import flag, integer, number
from zoptim.errors import UnknownNameError, did_you_mean
from zoptim.schedules import laws
from zoptim.schedules.base import Rate, Schedule

__all__ = ["WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]


class _NotGiven(float):
    """A default that overrides the optimizer's value, with a warning."""


_MAX_LR = _NotGiven(0.001)  # DeepSpeed's


class WarmupLR(Schedule):
    """Warm-up from warmup_min_lr to warmup_max_lr over warmup_num_steps updates, then a constant rate.

    warmup_max_lr: None means each group's own lr.  warmup_type: "log" or "linear".  As in DeepSpeed, fewer than 2
    warm-up steps count as 2, and the first two updates run at warmup_min_lr.  `exact_peak=True` changes both: see
    [Note: exact peak] in laws.py.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: Rate = 0.0,
        warmup_max_lr: Rate | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
        *,
        exact_peak: bool = False,
    ) -> None:
        self._limits = (warmup_min_lr, warmup_max_lr)
        self.exact_peak = flag("exact_peak", exact_peak)
        self.warmup_num_steps = _warmup_steps(warmup_num_steps, exact_peak)
        self.warmup_type = _warmup_type(warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def fraction(self, t: int) -> float:
        """Return the fraction of the way from warmup_min_lr (0) to warmup_max_lr (1).  Pure."""
        law = laws.exact_warmup_fraction if self.exact_peak else laws.warmup_fraction
        return law(t, self.warmup_num_steps, self.warmup_type)

    @property
    def min_lrs(self) -> list[float]:
        """Learning rate of each group at the start."""
        return self._rates("warmup_min_lr", self._limits[0])

    @property
    def max_lrs(self) -> list[float]:
        """Learning rate of each group after the warm-up."""
        high = self._limits[1]
        return self.base_lrs if high is None else self._rates("warmup_max_lr", high)

    @property
    def delta_lrs(self) -> list[float]:
        """Their differences."""
        return [most - least for least, most in zip(self.min_lrs, self.max_lrs)]

    def lrs(self, t: int) -> list[float]:
        fraction = self.fraction(t)
        return [least + (most - least) * fraction for least, most in zip(self.min_lrs, self.max_lrs)]


class WarmupDecayLR(WarmupLR):
    """WarmupLR, then a linear decay to warmup_min_lr at total_num_steps.

    As in DeepSpeed, warmup_max_lr defaults to 0.001, with a warning if the optimizer's lr differs; None means each
    group's own lr.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: Rate = 0.0,
        warmup_max_lr: Rate | None = _MAX_LR,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
        *,
        exact_peak: bool = False,
    ) -> None:
        self.total_num_steps = _total_steps(total_num_steps, warmup_num_steps)
        super().__init__(
            optimizer,
            warmup_min_lr,
            warmup_max_lr,
            warmup_num_steps,
            warmup_type,
            last_batch_iteration,
            exact_peak=exact_peak,
        )
        if isinstance(warmup_max_lr, _NotGiven) and (other := [lr for lr in self.base_lrs if lr != _MAX_LR]):
            warnings.warn(
                f"WarmupDecayLR was given no warmup_max_lr and rises to {_MAX_LR:g}, as in DeepSpeed; the "
                f"optimizer's lr, {', '.join(f'{lr:g}' for lr in other)}, has no effect. Set warmup_max_lr; "
                "None means the optimizer's lr.",
                stacklevel=2,
            )

    def fraction(self, t: int) -> float:
        law = laws.exact_decay_fraction if self.exact_peak else laws.decay_fraction
        return law(t, self.warmup_num_steps, self.total_num_steps, self.warmup_type)


class WarmupCosineLR(Schedule):
    """Each group's own lr times a ratio: from warmup_min_ratio to 1, then along half a cosine to cos_min_ratio.

    As in DeepSpeed, the ratio is 0 for the first update and never reaches 1; `exact_peak=True` corrects both: see
    [Note: exact peak] in laws.py.

    >>> import torch, zoptim
    >>> optimizer = zoptim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1.0)
    >>> schedule = zoptim.WarmupCosineLR(optimizer, 10, warmup_num_steps=2, warmup_type="linear", exact_peak=True)
    >>> rates = []
    >>> for _ in range(4):
    ...     rates.append(round(schedule.get_last_lr()[0], 3))
    ...     schedule.step()
    >>> rates
    [0.5, 1.0, 0.962, 0.854]
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
        *,
        exact_peak: bool = False,
    ) -> None:
        self.exact_peak = flag("exact_peak", exact_peak)
        self.total_num_steps = _total_steps(total_num_steps, warmup_num_steps)
        self.warmup_num_steps = _warmup_steps(warmup_num_steps, exact_peak)
        self.warmup_type = _warmup_type(warmup_type)
        self.low_ratios = (
            number("warmup_min_ratio", warmup_min_ratio, 0),
            number("cos_min_ratio", cos_min_ratio, 0),
        )
        super().__init__(optimizer, last_batch_iteration)

    def ratio(self, t: int) -> float:
        """Return the factor of every group's own lr.  Pure."""
        law = laws.exact_cosine_ratio if self.exact_peak else laws.cosine_ratio
        return law(t, self.warmup_num_steps, self.total_num_steps, self.warmup_type, self.low_ratios)

    @property
    def org_lrs(self) -> list[float]:
        """Each group's own lr."""
        return self.base_lrs

    def get_lr_ratio(self) -> float:
        """Return the factor of the next update."""
        return self.ratio(self.last_batch_iteration)

    def lrs(self, t: int) -> list[float]:
        return [base * self.ratio(t) for base in self.base_lrs]


def _warmup_steps(value: int, exact_peak: bool) -> int:
    steps = integer("warmup_num_steps", value)
    return steps if exact_peak else max(2, steps)


def _warmup_type(value: str) -> str:
    if value not in ("log", "linear"):
        raise UnknownNameError(
            f"warmup_type is {value!r}.{did_you_mean(value, ('log', 'linear'))} Allowed: 'log', 'linear'."
        )
    return value


def _total_steps(total: int, warmup: int) -> int:
    total = integer("total_num_steps", total, 1)
    if total < integer("warmup_num_steps", warmup):
        warnings.warn(
            f"total_num_steps {total} is less than warmup_num_steps {warmup}: the warm-up never ends.",
            stacklevel=3,
        )
    return total
