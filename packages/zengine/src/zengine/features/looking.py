"""Which features look into a run, and where they leave what they see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from zengine.features.base import Feature
from zengine.telemetry.sinks import folder_of

if TYPE_CHECKING:
    from zengine.config import Plan
    from zengine.config.profiling import FlopsPlan


def lookers(plan: Plan, *, in_stages: bool = False) -> tuple[Feature, ...]:
    """Those that the plan asks for; `in_stages`: of an engine of a pipeline."""
    profiling, folder = plan.profiling, run_folder(plan)
    chosen: list[Feature] = []
    if profiling.comms.enabled:
        from zengine.features.comms_summary import CommsSummary

        chosen.append(CommsSummary(profiling.comms, folder))
    if profiling.flops.enabled:
        chosen.append(_flops_feature(in_stages=in_stages)(profiling.flops, folder))
    if profiling.window.enabled:
        from zengine.features.profiler_window import ProfilerWindow

        place = profiling.window.folder or (folder or Path()) / "profile"
        chosen.append(ProfilerWindow(profiling.window, Path(place)))
    return tuple(chosen)


def _flops_feature(*, in_stages: bool) -> Callable[[FlopsPlan, Path | None], Feature]:
    if in_stages:
        from zengine.features.stage_flops import StageFlops

        return StageFlops
    from zengine.features.flops_profile import FlopsProfiling

    return FlopsProfiling


def run_folder(plan: Plan) -> Path | None:
    """The folder of the run's own record (`jsonl_monitor`); None where that is off."""
    monitor = plan.telemetry.jsonl_monitor
    return folder_of(monitor) if monitor.enabled else None
