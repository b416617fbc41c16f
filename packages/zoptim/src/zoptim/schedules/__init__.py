"""Learning-rate schedules: DeepSpeed's five, for any torch optimizer.

`laws` has the curves as pure functions; the classes add a counter and set the optimizer's rates.
"""

from zoptim.schedules.base import Schedule
from zoptim.schedules.build import LRSchedule, make_schedule
from zoptim.schedules.cycle import LRRangeTest, OneCycle
from zoptim.schedules.warmup import WarmupCosineLR, WarmupDecayLR, WarmupLR

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
