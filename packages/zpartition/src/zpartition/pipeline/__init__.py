"""Pipelines: a model cut into stages, and schedules that say who does what when."""

from .actions import Action, Kind
from .alarm import Alarm, StageFailed
from .cutting import CutError, cut, layer_weights
from .layers import LayerSpec, TiedLayerSpec
from .module import PipelineError, PipelineModule, Place
from .recorder import Recorder, picture, predict_like
from .runner import Passes, PipelineRunner
from .schedule import Schedule, ScheduleError
from .schedules import gpipe, interleaved, make_schedule, one_f_one_b, zero_bubble
from .timeline import Bar, Timeline, predict

__all__ = [
    "Action",
    "Alarm",
    "Bar",
    "CutError",
    "Kind",
    "LayerSpec",
    "Passes",
    "PipelineError",
    "PipelineModule",
    "PipelineRunner",
    "Place",
    "Recorder",
    "Schedule",
    "ScheduleError",
    "StageFailed",
    "TiedLayerSpec",
    "Timeline",
    "cut",
    "gpipe",
    "interleaved",
    "layer_weights",
    "make_schedule",
    "one_f_one_b",
    "picture",
    "predict",
    "predict_like",
    "zero_bubble",
]
