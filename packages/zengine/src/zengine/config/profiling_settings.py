"""The sections that look into a run: flops_profiler, profiler and comms_logger."""

from __future__ import annotations

from typing import Any

import attrs

from zengine.config.kinds import LIST, TEXT, TRUTH, Kind, null_or, number, whole
from zengine.config.table import setting

__all__ = ["CommsLogger", "FlopsProfiler", "Profiler"]


def _read_ranks(value: object) -> tuple[int, ...]:
    ranks: Any = LIST.read(value)
    return tuple(whole(0).read(rank) for rank in ranks)


def _read_names(value: object) -> tuple[str, ...]:
    names: Any = LIST.read(value)
    return tuple(TEXT.read(name) for name in names)


RANKS = Kind("a list of ranks", _read_ranks)
NAMES = Kind("a list of names", _read_names)


@attrs.frozen(kw_only=True)
class FlopsProfiler:
    """flops_profiler: one step counted module by module."""

    enabled: bool = setting(TRUTH, False, "count the operations of one step, by module")
    recompute_fwd_factor: float = setting(number(0), 0.0, "forwards that a backward does again, for the formula")
    profile_step: int = setting(whole(0), 1, "steps that are done before the one that is counted")
    module_depth: int = setting(whole(-1), -1, "deepest level of modules in the table; -1 = all")
    top_modules: int = setting(whole(0), 1, "classes named for each level, those with most first")
    detailed: bool = setting(TRUTH, True, "a line for every module")
    output_file: str = setting(null_or(TEXT, ""), "", "file of the table; empty: the standard output")


@attrs.frozen(kw_only=True)
class Profiler:
    """profiler: a key of ours; a window of steps under torch's profiler, and of memory."""

    enabled: bool = setting(TRUTH, False, "record a window of steps as a trace for chrome://tracing or Perfetto")
    start_step: int = setting(whole(1), 3, "first step that is recorded, counted from 1")
    steps: int = setting(whole(1), 2, "steps that are recorded")
    folder: str = setting(null_or(TEXT, ""), "", "folder of the traces; empty: profile/ in the run's folder")
    ranks: tuple[int, ...] = setting(RANKS, (0,), "ranks that record; []: all")
    record_shapes: bool = setting(TRUTH, False, "with the shapes of operands")
    with_stack: bool = setting(TRUTH, False, "with the lines of Python that called; slow")
    profile_memory: bool = setting(TRUTH, False, "with every allocation")
    memory_snapshot: bool = setting(TRUTH, False, "CUDA: also the allocator's history, for pytorch.org/memory_viz")


@attrs.frozen(kw_only=True)
class CommsLogger:
    """comms_logger."""

    enabled: bool = setting(TRUTH, False, "count calls, bytes and time of collectives")
    prof_all: bool = setting(TRUTH, True, "false: only those of prof_ops")
    prof_ops: tuple[str, ...] = setting(NAMES, (), "names of the operations to count where prof_all is false")
    verbose: bool = setting(TRUTH, False, "log a line for each collective that is counted")
    debug: bool = setting(TRUTH, False, "with its label in the engine in those lines")
