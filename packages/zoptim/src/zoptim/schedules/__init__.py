"""Learning-rate schedules: DeepSpeed's five laws, usable with any torch optimizer.

`laws` holds the curves as pure functions; the classes add a counter and write to the optimizer.
"""

from .base import Schedule
from .build import LRSchedule, make_schedule
from .cycle import LRRangeTest, OneCycle
from .warmup import WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = [
    "LRRangeTest",
    "LRSchedule",
    "OneCycle",
    "Schedule",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "make_schedule",
]
