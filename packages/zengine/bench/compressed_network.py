#!/usr/bin/env python3
"""Compressed against plain all-reduce over a network: two network namespaces of one machine, joined by a veth pair.

    python packages/zengine/bench/compressed_network.py [--links 0.1 1 10] [--numel 4194304] [--rounds 7] [--save]

One rank with one thread in each namespace; tc limits the rate (network_link.py).  The plain one is `zcomm.all_reduce`
of float32, the compressed one `zcomm.CompressedAllReduce.mean_buffers` of the same elements in 20 tensors, with its
encoding and decoding.  They take turns within every round; the time of a round is that of its slower rank, a figure
is the median of the rounds, and the ratio the median of the rounds' ratios.  MB are those that an interface sends in
a call, with headers.  Needs root.  `--save` writes bench/results/compressed-network.md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from network_link import INTERFACE, Link, LinkSpec, sent_bytes

import zcomm

RESULTS = Path(__file__).resolve().parent / "results" / "compressed-network.md"
NUM_TENSORS = 20
WARM_UP = 2  # rounds


def rank_main(rank: int, store: str, numel: int, rounds: int) -> None:
    """Measure on one rank; rank 0 prints (seconds of each round, bytes of a call) by contender."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    part = numel // NUM_TENSORS // 8 * 8
    layout = zcomm.SignLayout.packed([part] * NUM_TENSORS, 2)
    values = torch.randn(layout.buffers[0].numel, generator=torch.Generator().manual_seed(rank))
    plain, coded, reduce = values.clone(), values.clone(), zcomm.CompressedAllReduce(layout)
    contenders: dict[str, Callable[[], object]] = {
        "plain": lambda: zcomm.all_reduce(plain),
        "compressed": lambda: reduce.mean_buffers([coded]),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    sent: dict[str, int] = {}
    for index in range(rounds + WARM_UP):
        for name, call in contenders.items():
            plain.copy_(values)
            coded.copy_(values)
            zcomm.barrier()
            before, began_s = sent_bytes(), time.perf_counter()
            call()
            seconds = torch.tensor([time.perf_counter() - began_s])
            sent[name] = sent_bytes() - before
            zcomm.all_reduce(seconds, op="max")
            if index >= WARM_UP:
                times[name].append(float(seconds))
    assert zcomm.transport() != "shared memory", "the ranks must meet on the wire"
    if rank == 0:
        print(json.dumps({name: (times[name], sent[name]) for name in contenders}), flush=True)
    dist.barrier()
    os._exit(0)  # peers may leave threads that never end


def measured(spec: LinkSpec, options: argparse.Namespace) -> dict[str, tuple[list[float], int]]:
    """Start the two ranks; return what rank 0 prints."""
    with Link(spec) as link, tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(2):
            own = {"ZCOMM_HOST": f"host{rank}", "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
            place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            command = [sys.executable, __file__, "--rank", str(rank), "--store", f"{folder}/store"]
            command += ["--numel", str(options.numel), "--rounds", str(options.rounds)]
            made = subprocess.Popen(
                link.inside(rank, command),
                env={**os.environ, **own, **place},
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                text=True,
            )
            stack.callback(made.wait)
            stack.callback(made.kill)
            ranks.append(made)
        assert ranks[0].stdout is not None
        lines = [line for line in ranks[0].stdout if line.startswith("{")]
        if not lines or any(made.wait(timeout=60) for made in ranks):
            raise RuntimeError(f"a rank failed; {spec}")
        found: dict[str, tuple[list[float], int]] = json.loads(lines[0])
        return found


def row(spec: LinkSpec, found: dict[str, tuple[list[float], int]]) -> str:
    """Return a line of the table."""
    (plain, plain_bytes), (coded, coded_bytes) = found["plain"], found["compressed"]
    ratio = statistics.median(b / a for a, b in zip(coded, plain))
    low, high = sorted(b / a for a, b in zip(coded, plain))[:: len(plain) - 1]
    ms = lambda times: 1e3 * statistics.median(times)  # noqa: E731
    return (
        f"| {spec} | {ms(plain):.1f} | {ms(coded):.1f} | {ratio:.2f} ({low:.2f} to {high:.2f}) "
        f"| {plain_bytes / 1e6:.2f} | {coded_bytes / 1e6:.2f} | {plain_bytes / coded_bytes:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", type=LinkSpec.parse, nargs="+", default=[LinkSpec(0.1), LinkSpec(1), LinkSpec(10)])
    parser.add_argument("--numel", type=int, default=1 << 22)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank_main(options.rank, options.store, options.numel, options.rounds)
        return
    lines = [
        "| link | plain ms | compressed ms | plain / compressed | plain MB | compressed MB | ratio of MB |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    print("\n".join(lines))
    for spec in options.links:
        lines.append(row(spec, measured(spec, options)))
        print(lines[-1], flush=True)
    if options.save:
        links = " ".join(f"{spec.gbits:g}" for spec in options.links)
        head = [
            "# Compressed against plain all-reduce over a network",
            "",
            f"- date: {datetime.date.today()}",
            f"- machine: {platform.machine()}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.0f}; two",
            "  network namespaces, one rank of 1 thread in each",
            f"- versions: torch {torch.__version__}, zcomm {zcomm.__version__}",
            f"- command: `python packages/zengine/bench/compressed_network.py --links {links} "
            f"--numel {options.numel} --rounds {options.rounds} --save`",
            "",
        ]
        RESULTS.write_text("\n".join([*head, *lines]) + "\n")


if __name__ == "__main__":
    main()
