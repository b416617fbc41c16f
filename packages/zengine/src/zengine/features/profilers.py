"""Profilers of a run, and their output folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from zengine.engine.feature import Feature
from zengine.telemetry.sinks.table import folder_of

if TYPE_CHECKING:
    from zengine.config import Plan
    from zengine.config.plan.telemetry import FlopsPlan
    from zpartition.pipeline import PipelineRunner


def make_profilers(plan: Plan, pipeline: PipelineRunner | None = None) -> tuple[Feature, ...]:
    """Return the profilers that the plan asks for.  pipeline: of an engine with stages."""
    profiling, folder = plan.profiling, run_folder(plan)
    chosen: list[Feature] = []
    if profiling.comms.enabled:
        from zengine.features.comms_summary import CommsSummary

        chosen.append(CommsSummary(profiling.comms, folder))
    if profiling.flops.enabled:
        chosen.append(_flops_feature(profiling.flops, folder, pipeline))
    if profiling.window.enabled:
        from zengine.features.profiler_window import ProfilerWindow

        place = profiling.window.folder or (folder or Path()) / "profile"
        chosen.append(ProfilerWindow(profiling.window, Path(place)))
    return tuple(chosen)


def _flops_feature(plan: FlopsPlan, folder: Path | None, pipeline: PipelineRunner | None) -> Feature:
    if pipeline is not None:
        from zengine.flops.stage_feature import StageFlops

        return StageFlops(plan, folder, pipeline)
    from zengine.flops.feature import FlopsProfiling

    return FlopsProfiling(plan, folder)


def run_folder(plan: Plan) -> Path | None:
    """Return the folder of the run's record (`jsonl_monitor`); None if that is off."""
    monitor = plan.telemetry.jsonl_monitor
    return folder_of(monitor) if monitor.enabled else None
