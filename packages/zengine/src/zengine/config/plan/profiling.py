"""Profiling of the plan: the FLOPs profiler, the window of steps under torch's profiler, and the log of collectives.

These sections need no resolving: each is its own part of the plan.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from zengine.config.grammar.errors import NOWHERE, Problem
from zengine.config.keys.root import Settings
from zengine.config.keys.telemetry import CommsLogger, FlopsProfilerSection, Profiler
from zengine.config.plan.facts import Facts
from zengine.config.plan.parts import PlanRow, rows
from zengine.config.reading.load import Config

__all__ = ["CommsPlan", "FlopsPlan", "ProfilingPlan", "WindowPlan", "idle_profiling", "profiling", "profiling_rows"]

FlopsPlan = FlopsProfilerSection
WindowPlan = Profiler
CommsPlan = CommsLogger


@attrs.frozen(kw_only=True)
class ProfilingPlan:
    """All three."""

    flops: FlopsProfilerSection = attrs.field(factory=FlopsProfilerSection)
    window: Profiler = attrs.field(factory=Profiler)
    comms: CommsLogger = attrs.field(factory=CommsLogger)


def profiling(settings: Settings) -> ProfilingPlan:
    """The sections; a log that counts nothing is off."""
    comms = settings.comms_logger
    return ProfilingPlan(
        flops=settings.flops_profiler,
        window=settings.profiler,
        comms=attrs.evolve(comms, enabled=comms.counts_anything),
    )


def profiling_rows(plan: ProfilingPlan) -> Iterator[PlanRow]:
    """Rows of the three sections."""
    yield from rows("comms_logger.", plan.comms, CommsLogger)
    yield from rows("flops_profiler.", plan.flops, FlopsProfilerSection)
    yield from rows("profiler.", plan.window, Profiler)


def profiler_ranks_exist(config: Config, facts: Facts) -> list[Problem]:
    """A rank that records has to be one of the run's."""
    window, key = config.settings.profiler, "profiler.ranks"
    strangers = [rank for rank in window.ranks if rank >= facts.world_size]
    if not window.enabled or not strangers:
        return []
    return [
        Problem(
            place=config.given.get(key, NOWHERE),
            key=key,
            given=list(window.ranks),
            reason=f"this run has ranks 0 to {facts.world_size - 1}",
            suggestion="Name ranks of the run, or write [] for all of them.",
        )
    ]


def idle_profiling(config: Config, facts: Facts) -> list[str]:
    """Notices of keys without effect on this machine, or beside the other keys."""
    settings, notices = config.settings, []
    if settings.profiler.enabled and settings.profiler.memory_snapshot and facts.device_type != "cuda":
        key = "profiler.memory_snapshot"
        notices.append(
            f"{config.origin(key)}: {key} is a record of CUDA's allocator, and this run has none: the trace holds "
            "every allocation of the CPU instead, as with profiler.profile_memory"
        )
    comms = settings.comms_logger
    if comms.enabled and comms.prof_all and comms.prof_ops:
        key = "comms_logger.prof_ops"
        notices.append(f"{config.origin(key)}: {key} has no effect here: prof_all is true, so all are counted")
    if comms.enabled and not comms.counts_anything:
        key = "comms_logger.enabled"
        notices.append(f"{config.origin(key)}: comms_logger counts nothing: prof_all is false and prof_ops is empty")
    if comms.enabled and comms.debug and not comms.verbose:
        key = "comms_logger.debug"
        notices.append(f"{config.origin(key)}: {key} has no effect here: verbose is false, so there are no lines")
    return notices
