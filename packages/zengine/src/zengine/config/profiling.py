"""What looks into a run, resolved: plans of the FLOPs profiler, the profiler's window and the comms log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import attrs

from zengine.config.errors import NOWHERE, Problem

if TYPE_CHECKING:
    from zengine.config.load import Config
    from zengine.config.plan import Facts
    from zengine.config.schema import Settings

__all__ = ["CommsPlan", "FlopsPlan", "ProfilingPlan", "WindowPlan", "idle_profiling", "profiling", "profiling_rows"]


@attrs.frozen(kw_only=True)
class FlopsPlan:
    """The FLOPs profiler."""

    enabled: bool = False
    recompute_fwd_factor: float = 0.0  # forwards that a backward does again
    profile_step: int = 1  # steps done before the one that is counted
    module_depth: int = -1  # deepest level listed; -1 = all
    top_modules: int = 1  # classes named for each level
    detailed: bool = True  # a line for every module
    output_file: str = ""  # "" = the standard output


@attrs.frozen(kw_only=True)
class WindowPlan:
    """Steps under torch's profiler. Invariant: 1 <= start_step."""

    enabled: bool = False
    start_step: int = 3  # the first step recorded, counted from 1
    steps: int = 2
    folder: str = ""  # "" = profile/ in the run's folder
    ranks: tuple[int, ...] = (0,)  # that record; () = all
    record_shapes: bool = False
    with_stack: bool = False
    profile_memory: bool = False
    memory_snapshot: bool = False  # the CUDA allocator's history too


@attrs.frozen(kw_only=True)
class CommsPlan:
    """Which collectives are counted, and whether each is told."""

    enabled: bool = False
    prof_all: bool = True
    prof_ops: tuple[str, ...] = ()
    verbose: bool = False  # a line for each
    debug: bool = False  # with its label

    @property
    def ops(self) -> tuple[str, ...]:
        """The operations that are counted; () = all."""
        return () if self.prof_all else self.prof_ops


@attrs.frozen(kw_only=True)
class ProfilingPlan:
    """All three."""

    flops: FlopsPlan = FlopsPlan()
    window: WindowPlan = WindowPlan()
    comms: CommsPlan = CommsPlan()


def profiling(settings: Settings) -> ProfilingPlan:
    """The plans, which hold what the sections say."""
    return ProfilingPlan(
        flops=FlopsPlan(**attrs.asdict(settings.flops_profiler)),
        window=WindowPlan(**attrs.asdict(settings.profiler)),
        comms=CommsPlan(**{**attrs.asdict(settings.comms_logger), "enabled": _counts_anything(settings)}),
    )


def _counts_anything(settings: Settings) -> bool:
    comms = settings.comms_logger
    return comms.enabled and bool(comms.prof_all or comms.prof_ops)


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
    """What has no effect on this machine, or beside the other keys."""
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
    if comms.enabled and not _counts_anything(settings):
        key = "comms_logger.enabled"
        notices.append(f"{config.origin(key)}: comms_logger counts nothing: prof_all is false and prof_ops is empty")
    if comms.enabled and comms.debug and not comms.verbose:
        key = "comms_logger.debug"
        notices.append(f"{config.origin(key)}: {key} has no effect here: verbose is false, so there are no lines")
    return notices


def profiling_rows(plan: ProfilingPlan) -> Iterator[tuple[str, Any]]:
    """Key and value for people; a section that is off is one row."""
    for section, part in (("comms_logger", plan.comms), ("flops_profiler", plan.flops), ("profiler", plan.window)):
        yield f"{section}.enabled", part.enabled
        if part.enabled:
            fields = [field.name for field in attrs.fields(type(part)) if field.name != "enabled"]
            yield from ((f"{section}.{name}", _shown(getattr(part, name))) for name in fields)


def _shown(value: Any) -> Any:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "(all)"
    return "(default)" if value == "" else value
