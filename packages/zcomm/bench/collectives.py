#!/usr/bin/env python3
"""Speed of the collectives between CPU ranks of one host, and the limit set by memory.

    python packages/zcomm/bench/collectives.py [--ranks 2] [--mb 1 16 64 256] [--rounds 15] [--wait 60] [--save NAME]

Five contenders alternate within every round, so that a disturbance hits all of them: zero copy (tensors of
zcomm.shared_empty), staged (ordinary tensors, copied through shared memory), Gloo (zcomm without shared memory),
torch (torch.distributed's own function over Gloo), and the floor: the reads, additions and writes of one rank alone,
without communication, by the same C loops, on all ranks at once.  An all_reduce of N bytes reads and writes N in it,
as a copy of N bytes does.  all_gather is in place, with this rank's slice of the output as its input, as in sharded
training; reduce_scatter has a separate output.  The time of a round is that of its slowest rank; the figure is the
median of the rounds.  MB is the larger of input and output.  `--save NAME` writes bench/results/NAME.{md,json}.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zcomm
from zcomm import compat
from zcomm.shared import native
from zcomm.shared.native import DTYPES
from zcomm.testing import run_ranks

CONTENDERS = ("zero copy", "staged", "gloo", "torch", "floor")
OPS = ("all_reduce", "reduce_scatter", "all_gather")
RESULTS = Path(__file__).resolve().parent / "results"


def gloo_group() -> Any:
    """Make a second group of all ranks, over Gloo."""
    group = dist.new_group()
    os.environ["ZCOMM_TRANSPORT"] = "gloo"
    zcomm.barrier(group)
    del os.environ["ZCOMM_TRANSPORT"]
    return group


def floor(op: str, large: torch.Tensor, small: torch.Tensor) -> Callable[[], object]:
    """One rank's share of the work: a slice of `size` sources, all local."""
    size, part = zcomm.group_size(), large.numel() // zcomm.group_size()
    ffi, lib = native.library().ffi, native.library().lib
    slices = [ffi.cast("void *", each.data_ptr()) for each in large.view(size, part)]
    own = ffi.cast("void *", small.data_ptr())
    if op == "all_gather":
        nbytes, copy = small.nbytes, lib.zs_stream if large.nbytes >= 4 << 20 else ffi.memmove
        return lambda: [copy(each, own, nbytes) for each in slices[1:]]
    outputs, is_fresh = (slices, 0) if op == "all_reduce" else ([own], int(small.nbytes >= 4 << 20))
    sources, places = ffi.new("void *[]", slices), ffi.new("void *[]", outputs)
    return lambda: lib.zs_reduce(DTYPES[large.dtype], 0, size, sources, len(outputs), places, part, is_fresh)


def calls(op: str, nbytes: int, dtype: torch.dtype, gloo: Any) -> dict[str, Callable[[], object]]:
    """Map each contender to one collective."""
    size, rank = zcomm.group_size(), zcomm.group_rank()
    part = nbytes // dtype.itemsize // size
    shared, own = zcomm.shared_empty(part * size, dtype), torch.zeros(part * size, dtype=dtype)
    small, mine = torch.zeros(part, dtype=dtype), slice(rank * part, (rank + 1) * part)

    def call(large: torch.Tensor, group: Any = None) -> Callable[[], object]:
        if op == "all_reduce":
            return lambda: zcomm.all_reduce(large, group)
        if op == "reduce_scatter":
            return lambda: zcomm.reduce_scatter(small, large, group)
        return lambda: zcomm.all_gather(large, large[mine], group)

    torchs = {
        "all_reduce": lambda: dist.all_reduce(own, group=gloo),
        "reduce_scatter": lambda: compat.reduce_scatter_flat(small, own, group=gloo),
        "all_gather": lambda: compat.all_gather_flat(own, small, group=gloo),
    }[op]
    ours = {"zero copy": call(shared), "staged": call(own)}
    return {**ours, "gloo": call(own, gloo), "torch": torchs, "floor": floor(op, own, small)}


def rank_measures(op: str, nbytes: int, dtype_name: str, rounds: int) -> dict[str, list[float]]:
    """Map each contender to the seconds of each round on this rank."""
    contenders = calls(op, nbytes, getattr(torch, dtype_name), gloo_group())
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(rounds + 2):
        for name, run in contenders.items():
            zcomm.barrier()
            began_s = time.perf_counter()
            run()
            if index >= 2:  # two rounds to warm up
                times[name].append(time.perf_counter() - began_s)
    return times


def rank_measures_latency(rounds: int) -> dict[str, list[float]]:
    """Seconds per call of a barrier and of an all_reduce of one number, in rounds of 200."""
    gloo, number = gloo_group(), torch.ones(1)
    contenders = {
        "barrier, shared memory": lambda: zcomm.barrier(),
        "barrier, gloo": lambda: zcomm.barrier(gloo),
        "all_reduce of 4 bytes, shared memory": lambda: zcomm.all_reduce(number.fill_(1)),
        "all_reduce of 4 bytes, gloo": lambda: zcomm.all_reduce(number.fill_(1), gloo),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            zcomm.barrier()
            began_s = time.perf_counter()
            for _ in range(200):
                run()
            times[name].append((time.perf_counter() - began_s) / 200)
    return times


def busy_cores(seconds: float) -> float:
    """Average number of cores that other processes keep busy while this one sleeps; 0 if unknown."""
    try:
        used = []
        for pause in (seconds, 0.0):
            ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
            used.append(sum(ticks) - ticks[3] - ticks[4])
            time.sleep(pause)
    except OSError:
        return 0.0
    return (used[1] - used[0]) / os.sysconf("SC_CLK_TCK") / seconds


def wait_for_peace(limit_s: float) -> None:
    """Sleep until other processes are idle for a second, or the limit is over."""
    until_s = time.monotonic() + limit_s
    while time.monotonic() < until_s and busy_cores(1.0) > 0.15:
        pass


def medians(answers: list[dict[str, list[float]]]) -> dict[str, float]:
    """Map each contender to the median over the rounds of the slowest rank's seconds."""
    return {name: statistics.median(map(max, zip(*(answer[name] for answer in answers)))) for name in answers[0]}


def table(rows: list[dict[str, Any]], latency: dict[str, float], facts: dict[str, Any]) -> str:
    lines = [
        f"# Collectives between {facts['ranks']} CPU ranks of one host",
        "",
        f"{facts['processor']}, {facts['cores']} cores, {facts['system']}, torch {facts['torch']}, instruction set "
        f"{facts['level']}, {facts['date']}. Milliseconds, medians of {facts['rounds']} interleaved rounds, slowest "
        f"rank. Made by bench/collectives.py {facts['arguments']}, which describes the columns.",
        "",
        "| op | dtype | MB | zero copy | staged | Gloo | torch | floor "
        "| Gloo / zero copy | torch / zero copy | Gloo / staged | zero copy / floor | staged / floor |",
        "|" + "---|" * 13,
    ]
    for row in rows:
        ms = {name: row[name] * 1e3 for name in CONTENDERS}
        ratios = [("gloo", "zero copy"), ("torch", "zero copy"), ("gloo", "staged"), ("zero copy", "floor")]
        ratios.append(("staged", "floor"))
        cells = [f"{ms[name]:.3f}" for name in CONTENDERS] + [f"{ms[a] / ms[b]:.2f}" for a, b in ratios]
        lines.append(f"| {row['op']} | {row['dtype']} | {row['mb']} | {' | '.join(cells)} |")
    lines += ["", "| latency | microseconds |", "|---|---|"]
    lines += [f"| {name} | {seconds * 1e6:.1f} |" for name, seconds in latency.items()]
    return "\n".join(lines) + "\n"


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mb", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--wait", type=float, default=0.0, help="seconds to wait for an idle machine before each row")
    parser.add_argument("--save", metavar="NAME", default="")
    options = parser.parse_args()
    facts = {
        "ranks": options.ranks, "rounds": options.rounds, "processor": processor(), "cores": os.cpu_count(),
        "system": platform.system() + " " + platform.release(), "torch": torch.__version__,
        "level": native.library().level(), "date": time.strftime("%Y-%m-%d"),
        "arguments": " ".join(sys.argv[1:]),
    }  # fmt: skip
    rows = []
    for op in OPS:
        for dtype in options.dtype:
            for mb in options.mb:
                wait_for_peace(options.wait)
                answers = run_ranks(rank_measures, options.ranks, op, mb << 20, dtype, options.rounds, timeout_s=300)
                rows.append({"op": op, "dtype": dtype, "mb": mb, **medians(answers)})
    wait_for_peace(options.wait)
    latency = medians(run_ranks(rank_measures_latency, options.ranks, options.rounds))
    text = table(rows, latency, facts)
    print(text)
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{options.save}.md").write_text(text)
        found = {"facts": facts, "rows": rows, "latency": latency}
        (RESULTS / f"{options.save}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
