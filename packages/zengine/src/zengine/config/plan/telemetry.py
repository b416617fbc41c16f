"""Telemetry and profiling of the plan: measurements, where they are written, and the profilers.

The sections of the profilers need no resolving: each is its own part of the plan.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from zengine.config.grammar.errors import NOWHERE, Problem
from zengine.config.keys.root import Settings
from zengine.config.keys.telemetry import (
    CommsLogger,
    FlopsProfilerSection,
    MonitorKeys,
    Profiler,
    ThroughputSection,
)
from zengine.config.plan.facts import Facts
from zengine.config.plan.rows import PlanRow, planned, rows
from zengine.config.reading.load import Config

__all__ = [
    "CommsPlan",
    "FlopsPlan",
    "ProfilingPlan",
    "RatePlan",
    "TelemetryPlan",
    "WindowPlan",
    "check_profiler_ranks",
    "profiling",
    "profiling_notices",
    "profiling_rows",
    "rate_notices",
    "telemetry_plan",
    "telemetry_rows",
]

FlopsPlan = FlopsProfilerSection
WindowPlan = Profiler
CommsPlan = CommsLogger


@attrs.frozen(kw_only=True)
class RatePlan(ThroughputSection):
    """Throughput settings: the section timers.throughput, with `recomputation` as a string."""

    recomputation: str = "auto"  # "yes" | "no" | "auto": detected in the first step


@attrs.frozen(kw_only=True)
class TelemetryPlan(MonitorKeys):
    """Measurements and sinks: the keys that need no resolution, and derived values."""

    throughput: bool = True  # samples per second (timers.throughput)
    rates: RatePlan = RatePlan()
    comms_log: bool = False  # count, bytes and time of collectives
    comms_ops: tuple[str, ...] = ()  # operations that are counted; () = all
    gradient_histograms: int = 0  # steps between two histograms (tensorboard.gradient_histograms); 0 = none

    @property
    def is_wanted(self) -> bool:
        """True if a monitor, a log or a measurement is enabled; throughput alone does not count: no sink shows it."""
        keys = attrs.asdict(self, recurse=False, filter=lambda field, _: "row" in field.metadata)
        return self.comms_log or any(getattr(value, "enabled", bool(value)) for value in keys.values())


@attrs.frozen(kw_only=True)
class ProfilingPlan:
    """Plan of the FLOPs profiler, the window of traces and the log of collectives."""

    flops: FlopsProfilerSection = attrs.field(factory=FlopsProfilerSection)
    window: Profiler = attrs.field(factory=Profiler)
    comms: CommsLogger = attrs.field(factory=CommsLogger)


def telemetry_plan(settings: Settings) -> TelemetryPlan:
    """Resolve the telemetry sections."""
    comms, section = settings.comms_logger, settings.timers.throughput
    answers = {"auto": "auto", True: "yes", False: "no"}
    return TelemetryPlan(
        **{field.name: getattr(settings, field.name) for field in attrs.fields(MonitorKeys)},
        throughput=section.enabled or settings.bench_steps > 0,
        rates=RatePlan(**planned(section, RatePlan, recomputation=answers[section.recomputation])),
        comms_log=comms.counts_anything,
        comms_ops=comms.ops,
        gradient_histograms=settings.tensorboard.gradient_histograms if settings.tensorboard.enabled else 0,
    )


def profiling(settings: Settings) -> ProfilingPlan:
    """Return the profiling sections; a log that counts nothing is off."""
    comms = settings.comms_logger
    return ProfilingPlan(
        flops=settings.flops_profiler,
        window=settings.profiler,
        comms=attrs.evolve(comms, enabled=comms.counts_anything),
    )


def telemetry_rows(telemetry: TelemetryPlan) -> Iterator[PlanRow]:
    """Yield the rows of the telemetry keys."""
    yield from rows("", telemetry, MonitorKeys)
    yield from rows("timers.throughput.", telemetry.rates, ThroughputSection, enabled=telemetry.throughput)


def profiling_rows(plan: ProfilingPlan) -> Iterator[PlanRow]:
    """Yield the rows of the profiling sections."""
    yield from rows("comms_logger.", plan.comms, CommsLogger)
    yield from rows("flops_profiler.", plan.flops, FlopsProfilerSection)
    yield from rows("profiler.", plan.window, Profiler)


def rate_notices(config: Config) -> list[str]:
    """Return notices of timers.throughput keys if no sink shows the throughput."""
    if telemetry_plan(config.settings).is_wanted:
        return []
    keys = [key for key in config.given if key.startswith("timers.throughput.") and not key.endswith(".enabled")]
    return [
        f"{config.origin(key)}: {key} has no effect here: no output shows the throughput (steps_per_print, "
        "bench_steps and the monitors are off)"
        for key in keys
    ]


def check_profiler_ranks(config: Config, facts: Facts) -> list[Problem]:
    """Require that the recording ranks exist."""
    window, key = config.settings.profiler, "profiler.ranks"
    missing = [rank for rank in window.ranks if rank >= facts.world_size]
    if not window.enabled or not missing:
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


def profiling_notices(config: Config, facts: Facts) -> list[str]:
    """Return notices of profiling keys without effect on this machine or in this combination."""
    settings, notices = config.settings, []
    if settings.profiler.enabled and settings.profiler.memory_snapshot and facts.device_type != "cuda":
        key = "profiler.memory_snapshot"
        notices.append(
            f"{config.origin(key)}: {key} records CUDA's allocator, which this run does not use: the trace contains "
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
    tuning = settings.autotuning
    if tuning.enabled and not (tuning.metric_path or tuning.model_info_path):
        key = "autotuning.enabled"
        notices.append(
            f"{config.origin(key)}: {key} has no effect here: `deepspeed --autotuning tune` or `run` did not start "
            "this script"
        )
    return notices
