"""Telemetry of the plan: what is measured and where it is written."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from zengine.config.keys.root import Settings
from zengine.config.keys.telemetry import MonitorKeys, ThroughputSection
from zengine.config.plan.parts import PlanRow, planned, rows
from zengine.config.reading.load import Config

__all__ = ["RatePlan", "TelemetryPlan", "idle_rates", "telemetry_plan", "telemetry_rows"]


@attrs.frozen(kw_only=True)
class RatePlan(ThroughputSection):
    """Computation of speed: the section timers.throughput, with an answer for recomputation."""

    recomputation: str = "auto"  # "yes" | "no" | "auto": measured in the first step


@attrs.frozen(kw_only=True)
class TelemetryPlan(MonitorKeys):
    """Measurements and their destinations: the keys that need no resolving, and values derived from others."""

    throughput: bool = True  # samples per second (timers.throughput)
    rates: RatePlan = RatePlan()
    comms_log: bool = False  # count, bytes and time of collectives
    comms_ops: tuple[str, ...] = ()  # operations that are counted; () = all
    gradient_histograms: int = 0  # steps between two histograms (tensorboard.gradient_histograms); 0 = none

    @property
    def is_wanted(self) -> bool:
        """Something is asked for.  ThroughputSection alone does not count: without a monitor nothing shows it."""
        keys = attrs.asdict(self, recurse=False, filter=lambda field, _: "row" in field.metadata)
        return self.comms_log or any(getattr(value, "enabled", bool(value)) for value in keys.values())


def telemetry_plan(settings: Settings) -> TelemetryPlan:
    """The sections about telemetry, resolved."""
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


def idle_rates(config: Config) -> list[str]:
    """Notices of keys about speed that nothing shows."""
    if telemetry_plan(config.settings).is_wanted:
        return []
    keys = [key for key in config.given if key.startswith("timers.throughput.") and not key.endswith(".enabled")]
    return [
        f"{config.origin(key)}: {key} has no effect here: nothing reports the speed (steps_per_print, bench_steps "
        "and the monitors are off)"
        for key in keys
    ]


def telemetry_rows(telemetry: TelemetryPlan) -> Iterator[PlanRow]:
    """Rows of the keys about telemetry."""
    yield from rows("", telemetry, MonitorKeys)
    yield from rows("timers.throughput.", telemetry.rates, ThroughputSection, enabled=telemetry.throughput)
