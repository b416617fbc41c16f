"""The base class of the five schedules: a counter, and a law that maps it to learning rates.

The counter is the whole state.  Loading it sets the learning rates at once, so optimizer and schedule may be restored
in any order.  Rejected: torch's LRScheduler as the base class; it is defined by recurrences and keeps a dozen
attributes in its state, where these laws are closed forms.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zoptim.checks import integer, number

__all__ = ["Rate", "Schedule", "check_optimizer"]

Rate = float | Sequence[float]  # one for all groups, or one for each

_MOST_UPDATES = 2**53  # exact as a float


class Schedule:
    """Sets the learning rate of each parameter group from the number of applied updates.

    Call `step()` once after each *applied* update.  The base class keeps each group's own learning rate.

    Invariant: after construction, `step` and `load_state_dict`, every group's lr is the law's value at
    `last_batch_iteration`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int = -1) -> None:
        self.optimizer = check_optimizer(optimizer)
        # Each group's own lr.  `initial_lr` is torch's name for it; optimizer checkpoints contain it.
        self.base_lrs = [float(g.setdefault("initial_lr", float(g["lr"]))) for g in optimizer.param_groups]
        # -1 before the first applied update, 0 after it.
        self.last_batch_iteration = integer("last_batch_iteration", last_batch_iteration, -1)
        self._apply()

    def lrs(self, t: int) -> list[float]:
        """Evaluate the law: one learning rate per group at t = last_batch_iteration.  Pure."""
        return list(self.base_lrs)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Count one applied update (or jump to the given count) and set the learning rates."""
        t = self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        self.last_batch_iteration = integer("last_batch_iteration", t, -1)
        self._apply()

    def get_lr(self) -> list[float]:
        """Return the learning rates of the next update, one per group."""
        return self.lrs(self.last_batch_iteration)

    def get_last_lr(self) -> list[float]:
        """Return the rates that were set last, the same as get_lr()."""
        return self.get_lr()

    def state_dict(self) -> dict[str, int]:
        """Return {"last_batch_iteration": int}, the whole state."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counter and set the learning rates.  Raises ValueError for another schedule's state."""
        self.prepare_load(state)()

    def prepare_load(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Check a state without a change; return a function that restores it and cannot fail.  Raises ValueError."""
        if not isinstance(state, Mapping) or "last_batch_iteration" not in state:
            has = ", ".join(map(str, state)) or "nothing" if isinstance(state, Mapping) else "no keys at all"
            raise ValueError(f"the state of a {type(self).__name__} needs last_batch_iteration; it has {has}.")
        t = integer("last_batch_iteration", state["last_batch_iteration"], -1)
        if t > _MOST_UPDATES:
            raise ValueError(f"last_batch_iteration is {t}; it must be at most {_MOST_UPDATES}.")
        return functools.partial(self.step, t)

    def _apply(self) -> None:
        groups = self.optimizer.param_groups
        if len(groups) != len(self.base_lrs):
            raise ValueError(
                f"{type(self).__name__} was built for {len(self.base_lrs)} parameter groups, the optimizer now "
                f"has {len(groups)}. Build the schedule after the last add_param_group()."
            )
        for group, lr in zip(groups, self.get_lr()):
            if isinstance(group["lr"], Tensor):
                with torch.no_grad():
                    group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def _rates(self, name: str, value: Rate) -> list[float]:
        """Return one learning rate per group, as `_per_group`; one number for all gets muP's factors (mup.py)."""
        rates = self._per_group(name, value)
        if isinstance(value, (list, tuple)):
            return rates
        return [rate * group.get("mup_lr_factor", 1.0) for rate, group in zip(rates, self.optimizer.param_groups)]

    def _per_group(self, name: str, value: Rate, high: float = math.inf) -> list[float]:
        """Return one number in [0, high) per group, from one number for all or a sequence with one for each."""
        if not isinstance(value, (list, tuple)):
            return [number(name, value, 0, high)] * len(self.base_lrs)
        if len(value) != len(self.base_lrs):
            raise ValueError(
                f"{name} has {len(value)} values for {len(self.base_lrs)} parameter groups; "
                "give one number for all, or one for each."
            )
        return [number(f"{name}[{position}]", each, 0, high) for position, each in enumerate(value)]


def check_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return `optimizer`.  Raises TypeError unless it is a torch.optim.Optimizer."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}; it must be a torch.optim.Optimizer.")
    return optimizer
