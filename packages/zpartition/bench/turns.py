"""Contenders exist at once and run in turns, so that a slow minute of the machine affects all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import zcomm

Taken = TypeVar("Taken")


def timed(call: Callable[[], object]) -> float:
    """Milliseconds of a call that all ranks start together."""
    zcomm.barrier()
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def take_turns(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    measure: Callable[[Callable[[], object]], Taken],
    warm_up: int = 3,
) -> dict[str, list[Taken]]:
    """Return what `measure` returns for each call in each of so many rounds, after `warm_up` that do not count."""
    found: dict[str, list[Taken]] = {name: [] for name in calls}
    for index in range(rounds + warm_up):
        for name, call in calls.items():
            taken = measure(call)
            if index >= warm_up:
                found[name].append(taken)
    return found


def medians(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Milliseconds of each call on this rank."""
    return {name: statistics.median(values) for name, values in take_turns(calls, rounds, timed).items()}
