"""Ranks of `zcomm.testing.run_ranks` on the simulated device: a violation in a rank fails its test."""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any

from simulated_cuda.library import library, set_schedule, take_violations

__all__ = ["SCHEDULE_VARIABLE", "install"]

SCHEDULE_VARIABLE = "SIMULATED_CUDA_SCHEDULE"  # early, late, or random:SEED; tests and their ranks read it


def install(rank: ModuleType) -> None:
    """Wrap the function that calls a job's function; `rank` is the module zcomm.testing.rank."""
    plain = rank.call

    @functools.wraps(plain)
    def call(function: Any, args: Any, kwargs: Any) -> Any:
        set_schedule(os.environ.get(SCHEDULE_VARIABLE, "early"))
        library().sim_set_stream(0)
        take_violations()
        result = plain(function, args, kwargs)
        library().sim_synchronize()
        found = take_violations()
        if found:
            raise AssertionError("\n".join(found))
        return result

    rank.call = call  # type: ignore[attr-defined]
