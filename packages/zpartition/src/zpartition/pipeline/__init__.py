"""Pipeline parallelism: a model partitioned into stages, and schedules of their forwards and backwards."""

from __future__ import annotations

from zpartition._renamed import renamed
from zpartition.pipeline.abort import AbortGuard, StageFailed
from zpartition.pipeline.layers import LayerSpec, TiedLayerSpec
from zpartition.pipeline.module import PipelineError, PipelineModule, PipelinePosition
from zpartition.pipeline.partition_layers import LayerPartitionError, layer_weights, partition_balanced
from zpartition.pipeline.runner import Passes, PipelineRunner
from zpartition.pipeline.schedule import (
    Action,
    ActionKind,
    Schedule,
    ScheduleError,
    gpipe,
    interleaved,
    make_schedule,
    one_f_one_b,
    zero_bubble,
)
from zpartition.pipeline.timeline import Bar, Recorder, Timeline, comparison_svg, simulate, simulate_measured

__all__ = [
    "AbortGuard",
    "Action",
    "ActionKind",
    "Bar",
    "LayerPartitionError",
    "LayerSpec",
    "Passes",
    "PipelineError",
    "PipelineModule",
    "PipelinePosition",
    "PipelineRunner",
    "Recorder",
    "Schedule",
    "ScheduleError",
    "StageFailed",
    "TiedLayerSpec",
    "Timeline",
    "comparison_svg",
    "gpipe",
    "interleaved",
    "layer_weights",
    "make_schedule",
    "one_f_one_b",
    "partition_balanced",
    "simulate",
    "simulate_measured",
    "zero_bubble",
]

RENAMED = {
    "Alarm": "AbortGuard",
    "CutError": "LayerPartitionError",
    "Kind": "ActionKind",
    "Place": "PipelinePosition",
    "cut": "partition_balanced",
    "picture": "comparison_svg",
    "predict": "simulate",
    "predict_like": "simulate_measured",
}
__getattr__ = renamed(__name__, RENAMED)
