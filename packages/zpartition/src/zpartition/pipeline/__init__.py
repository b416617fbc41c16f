"""Pipelines: a model cut into stages, and schedules that say who does what when."""

from .actions import Action, Kind
from .cutting import CutError, cut, layer_weights
from .schedule import Schedule, ScheduleError
from .schedules import gpipe, interleaved, make_schedule, one_f_one_b, zero_bubble
from .timeline import Bar, Timeline, predict

__all__ = [
    "Action",
    "Bar",
    "CutError",
    "Kind",
    "Schedule",
    "ScheduleError",
    "Timeline",
    "cut",
    "gpipe",
    "interleaved",
    "layer_weights",
    "make_schedule",
    "one_f_one_b",
    "predict",
    "zero_bubble",
]
