#!/usr/bin/env python3
"""Quantized collectives in 8 and 4 bits: bytes saved and time spent, relative to the plain collectives.

    python packages/zcomm/bench/quantized.py [--ranks 2] [--mb 1 16 64] [--rounds 9] [--gloo] [--save]

Contenders alternate within every round; the time of a round is that of its slowest rank, the figure is the median of
the rounds.  MB is the whole float32 tensor that is gathered or reduced.  Bytes are those that one rank sends to
others. On one host bytes are cheap: through shared memory the plain collectives win by far, and that is what this
prints; `--gloo` uses sockets instead.  The error is the largest one, relative to the largest magnitude of the result.
`--save` writes bench/results/quantized.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import attrs
import torch

import zcomm
from zcomm.testing import run_ranks

RESULTS = Path(__file__).resolve().parent / "results" / "quantized.md"
INT8, INT4 = zcomm.BlockCode(bits=8), zcomm.BlockCode(bits=4, block=128)


@attrs.frozen
class Contender:
    """One way to move a tensor."""

    run: Callable[[], object]
    result: torch.Tensor
    num_bytes: int  # that one rank sends


def contenders(numel: int) -> dict[str, Contender]:
    """Contenders by name; the first of a collective is the exact one."""
    size, rank = zcomm.group_size(), zcomm.group_rank()
    part, others = numel // size, size - 1
    whole = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
    own, message = whole[:part].clone(), INT8.encode(whole[:part])
    exact, coded = torch.empty(numel), torch.empty(numel)
    sums = {name: torch.empty(part) for name in ("plain", "int8", "int4")}

    def encode_and_gather() -> None:
        zcomm.all_gather_quantized(coded, INT8.encode(own), code=INT8)

    def reduce(code: zcomm.BlockCode, output: torch.Tensor) -> Contender:
        run = lambda: zcomm.reduce_scatter_quantized(output, whole, code=code)  # noqa: E731
        return Contender(run, output, others * code.num_bytes(part))

    return {
        "all_gather float32": Contender(lambda: zcomm.all_gather(exact, own), exact, others * own.nbytes),
        "all_gather int8": Contender(
            lambda: zcomm.all_gather_quantized(coded, message, code=INT8), coded, others * message.nbytes
        ),
        "all_gather int8, encoded too": Contender(encode_and_gather, coded, others * message.nbytes),
        "reduce_scatter float32": Contender(
            lambda: zcomm.reduce_scatter(sums["plain"], whole), sums["plain"], others * 4 * part
        ),
        "reduce_scatter int8": reduce(INT8, sums["int8"]),
        "reduce_scatter int4": reduce(INT4, sums["int4"]),
    }


def rank_measures(numel: int, rounds: int) -> dict[str, tuple[list[float], int, float]]:
    """Map each name to (seconds of each round on this rank, bytes sent, relative error)."""
    torch.set_num_threads(1)
    found = contenders(numel)
    times: dict[str, list[float]] = {name: [] for name in found}
    for index in range(rounds + 2):
        for name, contender in found.items():
            zcomm.barrier()
            began_s = time.perf_counter()
            contender.run()
            if index >= 2:  # two rounds to warm up
                times[name].append(time.perf_counter() - began_s)
    answers = {}
    for name, contender in found.items():
        exact = found[f"{name.split()[0]} float32"].result
        error = float((contender.result - exact).abs().max() / exact.abs().max())
        answers[name] = (times[name], contender.num_bytes, error)
    return answers


def rows(ranks: int, mb: float, rounds: int) -> list[str]:
    """One table row per contender."""
    numel = int(mb * 2**18) // (1024 * ranks) * 1024 * ranks
    answers = run_ranks(rank_measures, ranks, numel, rounds, timeout_s=600)
    lines, plain = [], (1.0, 1.0)
    for name, (_, num_bytes, error) in answers[0].items():
        slowest = [max(round_) for round_ in zip(*(answer[name][0] for answer in answers))]
        ms = statistics.median(slowest) * 1e3
        if name.endswith("float32"):
            plain = (ms, float(num_bytes))
        lines.append(
            f"| {mb:g} | {name} | {num_bytes / 2**20:.2f} | {num_bytes / plain[1]:.3f} | {ms:.2f} | "
            f"{ms / plain[0]:.2f} | {error:.1e} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mb", type=float, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--gloo", action="store_true")
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    if given.gloo:
        os.environ["ZCOMM_TRANSPORT"] = "gloo"
    wire = "Gloo's sockets" if given.gloo else "shared memory"
    table = [line for mb in given.mb for line in rows(given.ranks, mb, given.rounds)]
    lines = [
        f"# Few bits between {given.ranks} CPU ranks of one host, through {wire}",
        "",
        f"torch {torch.__version__}, {os.cpu_count()} cores, one thread a rank, median of {given.rounds} rounds of "
        f"the slowest rank; load average {os.getloadavg()[0]:.1f} (others' work included).",
        "",
        "| MB | | MiB sent | of plain | ms | of plain | error |",
        "|---:|---|---:|---:|---:|---:|---:|",
        *table,
    ]
    print("\n".join(lines))
    if given.save:
        RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
