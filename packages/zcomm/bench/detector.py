#!/usr/bin/env python3
"""Overhead of the hang detector per collective: nanoseconds of host time, without any communication.

    python packages/zcomm/bench/detector.py

Measured in a real world of two ranks, on rank 0.  "Below" are library frames between the collective and the line of
the user's program, as in a hook of autograd.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import zcomm
from zcomm.hangs import detector
from zcomm.hangs.fingerprint import Call
from zcomm.hangs.observer import observer
from zcomm.testing import run_ranks

CALLS, ROUNDS = 5_000, 15


def nanoseconds(call: Callable[[], Any]) -> float:
    """Median time of a call over the rounds."""
    rounds = []
    for _ in range(ROUNDS):
        began = time.perf_counter_ns()
        for _ in range(CALLS):
            call()
        rounds.append((time.perf_counter_ns() - began) / CALLS)
    return statistics.median(rounds)


def below(depth: int, call: Callable[[], Any]) -> Callable[[], Any]:
    """Return `call` under frames that look like torch's own."""
    for _ in range(depth):
        scope = {"call": call}
        exec(compile("def frame(): return call()", torch.__file__, "exec"), scope)
        call = scope["frame"]
    return call


def rank_measures() -> dict[str, float]:
    group, reduction = dist.group.WORLD, dist.ReduceOp.SUM
    tensor = torch.zeros(4)
    call = Call.of("all_reduce", "bucket[3]", 2, tensor)

    def in_context() -> None:
        with zcomm.context("step 12"):
            pass

    def all_of_it() -> None:
        observer().check(observer().record(call, group, reduction))

    present = detector.start()
    assert present is not None
    ring = present.ring(group)
    rows = {
        "an empty call": lambda: None,
        "15 frames and an empty call": below(15, lambda: None),
        "fingerprint, called by the program": lambda: ring.add(call, reduction),
        "fingerprint, 15 frames below": below(15, lambda: ring.add(call, reduction)),
        "all of it, called by the program": all_of_it,
        "all of it, 15 frames below": below(15, all_of_it),
        "context entered and left": in_context,
    }
    found = {name: nanoseconds(row) for name, row in rows.items()} if dist.get_rank() == 0 else {}
    zcomm.barrier()
    return found


if __name__ == "__main__":
    for name, ns in run_ranks(rank_measures, 2)[0].items():
        print(f"{name:<36}{ns:8.0f} ns")
