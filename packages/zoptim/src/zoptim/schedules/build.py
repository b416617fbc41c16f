"""Schedules by name and parameter dict: DeepSpeed's five, and torch's schedulers by exact name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch.optim import lr_scheduler as torch_schedulers

from zoptim.checks import check_option_names
from zoptim.errors import UnknownNameError, did_you_mean
from zoptim.schedules.base import Schedule
from zoptim.schedules.cycle import LRRangeTest, OneCycle
from zoptim.schedules.warmup import WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = ["LRSchedule", "make_schedule"]


class LRSchedule(Protocol):
    """The interface that zoptim's schedules and torch's have in common."""

    def step(self) -> None: ...

    def get_last_lr(self) -> list[Any]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> None: ...


_OWN: dict[str, type[Schedule]] = {
    cls.__name__: cls for cls in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}


def make_schedule(name: str, optimizer: torch.optim.Optimizer, params: Mapping[str, Any] | None = None) -> LRSchedule:
    """Build the schedule of a config's `{"type": name, "params": params}`.

    Schedulers of torch are returned unwrapped: step() of ReduceLROnPlateau and others has arguments of its own.

    Raises UnknownNameError for an unknown name or parameter (with the nearest one), ValueError for a missing
    parameter, ValueError or TypeError for values out of range.

    >>> import torch, zoptim
    >>> optimizer = zoptim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1.0)
    >>> schedule = zoptim.make_schedule("WarmupLR", optimizer, {"warmup_num_steps": 4, "warmup_type": "linear"})
    >>> schedule.get_last_lr()
    [0.0]
    """
    if not isinstance(name, str):
        raise TypeError(f"the schedule's name is {name!r}; it must be a string such as 'WarmupLR'.")
    classes = {**_torch_classes(), **_OWN}
    if name not in classes:
        raise UnknownNameError(
            f"there is no schedule {name!r}.{did_you_mean(name, classes)} "
            f"Allowed: {', '.join(_OWN)}; by exact name torch's {', '.join(sorted(_torch_classes()))}."
        )
    given = dict(params or {})
    expected = {key: p for key, p in inspect.signature(classes[name]).parameters.items() if key != "optimizer"}
    check_option_names(name, given, expected)
    missing = [key for key, p in expected.items() if p.default is p.empty and key not in given]
    if missing:
        raise ValueError(f"{name} needs {', '.join(missing)}; it was given {', '.join(given) or 'nothing'}.")
    made: LRSchedule = classes[name](optimizer=optimizer, **given)
    return made


def _torch_classes() -> dict[str, Any]:
    base = torch_schedulers.LRScheduler
    return {
        name: value
        for name, value in vars(torch_schedulers).items()
        if isinstance(value, type) and issubclass(value, base) and value is not base and not name.startswith("_")
    }
