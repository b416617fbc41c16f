#!/usr/bin/env python3
"""Gain of a two-level group over plain Gloo, with hosts simulated on one machine.

    python packages/zcomm/bench/hosts.py [--per-host 2] [--hosts 2] [--kb 4 64 1024 16384 65536] [--rounds 9] [--save]

Contenders alternate within every round: two levels with ordinary tensors, two levels with tensors of
zcomm.shared_empty, and plain Gloo (ZCOMM_TRANSPORT=gloo).  KB is the larger of input and output.  The time of a round
is that of its slowest rank; the figure is the median of the rounds.

Limits: ZCOMM_HOST simulates several hosts on one machine, so the loopback interface stands for the network.  It has
no wire, its latency is that of a few system calls, and it uses the processors that compute as well.  Between real
hosts the bytes that a host sends count, and two levels reduce them (an all_reduce of n bytes over H hosts sends 2 n
(H - 1) / H from each host; a ring over all ranks the same on each of its *edges*, of which only those between hosts
cost), so expect other ratios there.  `--save` writes bench/results/hosts.{md,json}.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from datetime import date
from typing import Any

import torch
from collectives import RESULTS, gloo_group, medians, processor, wait_for_peace

import zcomm
from zcomm.testing import run_ranks

CONTENDERS = ("two levels", "two levels, shared_empty", "gloo")
OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")


def calls(op: str, numel: int, gloo: Any) -> dict[str, Callable[[], object]]:
    """Map each contender to one collective."""
    size, rank = zcomm.group_size(), zcomm.group_rank()
    part = numel // size
    shared, own, small = zcomm.shared_empty(part * size), torch.zeros(part * size), torch.zeros(part)
    mine = slice(rank * part, (rank + 1) * part)

    def call(large: torch.Tensor, group: Any = None) -> Callable[[], object]:
        return {
            "all_reduce": lambda: zcomm.all_reduce(large, group),
            "reduce_scatter": lambda: zcomm.reduce_scatter(small, large, group),
            "all_gather": lambda: zcomm.all_gather(large, large[mine], group),
            "broadcast": lambda: zcomm.broadcast(large, group),
        }[op]

    return dict(zip(CONTENDERS, (call(own), call(shared), call(own, gloo))))


def rank_measures(op: str, nbytes: int, rounds: int, per_host: int) -> dict[str, list[float]]:
    """Map each contender to the seconds of each round on this rank."""
    os.environ["ZCOMM_HOST"] = f"host{zcomm.group_rank() // per_host}"
    if op == "barrier":
        gloo = gloo_group()
        contenders: dict[str, Callable[[], object]] = {
            "two levels": lambda: zcomm.barrier(),
            "gloo": lambda: zcomm.barrier(gloo),
        }
    else:
        contenders = calls(op, nbytes // 4, gloo_group())
    zcomm.barrier()
    assert zcomm.transport() == "shared memory + gloo"
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(rounds + 2):
        for name, run in contenders.items():
            zcomm.barrier()
            began_s = time.perf_counter()
            run()
            if index >= 2:  # two rounds to warm up
                times[name].append(time.perf_counter() - began_s)
    return times


def table(rows: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    lines = [
        f"# Collectives of {facts['hosts']} x {facts['per_host']} CPU ranks on simulated hosts",
        "",
        f"{facts['processor']}, {facts['cores']} cores, {facts['system']}, torch {facts['torch']}, {facts['date']}. "
        f"float32, milliseconds, medians of {facts['rounds']} interleaved rounds, slowest rank; load average of the "
        f"machine before: {facts['load']}. All ranks run on one "
        "machine and its loopback interface stands for the network: times and ratios between real hosts will "
        "differ. Made by bench/hosts.py, which has the details.",
        "",
        "| op | KB | two levels | two levels, shared_empty | Gloo | Gloo / two levels | Gloo / shared_empty |",
        "|" + "---|" * 7,
    ]
    for row in rows:
        own, shared, gloo = (row.get(name) for name in CONTENDERS)
        second = (f"{shared * 1e3:.3f}", f"{gloo / shared:.1f}") if shared else ("", "")
        cells = [f"{own * 1e3:.3f}", second[0], f"{gloo * 1e3:.3f}", f"{gloo / own:.1f}", second[1]]
        lines.append(f"| {row['op']} | {row['kb'] or ''} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--per-host", type=int, default=2)
    parser.add_argument("--kb", type=int, nargs="+", default=[4, 64, 1024, 16384, 65536])
    parser.add_argument("--ops", nargs="+", default=list(OPS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--wait", type=float, default=60.0, help="seconds to wait for a quiet machine")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    facts = {
        **{name: getattr(options, name) for name in ("hosts", "per_host", "rounds")},
        "processor": processor(), "cores": os.cpu_count(), "torch": torch.__version__,
        "load": f"{os.getloadavg()[0]:.1f}",
        "system": f"{platform.system()} {platform.release()}", "date": str(date.today()),
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    for op, kb in [(op, kb) for op in options.ops for kb in options.kb] + [("barrier", 0)]:
        wait_for_peace(options.wait)
        size = options.hosts * options.per_host
        answers = run_ranks(rank_measures, size, op, kb << 10, options.rounds, options.per_host, timeout_s=300)
        rows.append({"op": op, "kb": kb, **medians(answers)})
    text = table(rows, facts)
    print(text)
    if options.save:
        (RESULTS / "hosts.md").write_text(text)
        (RESULTS / "hosts.json").write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
