#!/usr/bin/env python3
"""Cost of sign codes: each phase of a compressed all-reduce, in C and with torch's operations, beside a copy.

    python packages/zcomm/bench/signs.py [--numel 8388608] [--tensors 20] [--ranks 2] [--rounds 15] [--save]

One process plays rank 0, with one thread, and no message is sent.  Contenders alternate within every round; a figure
is the median of the rounds, in nanoseconds for each element of the whole, and a ratio the median of the rounds'
ratios.  The copy is `Tensor.copy_` between two tensors of the whole's length: one read and one write.
`--save` writes bench/results/signs.md.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import zcomm
from zcomm.collectives.sign_kernels import KernelPhases
from zcomm.collectives.sign_layout import SignLayout
from zcomm.collectives.sign_phases import SignPhases, TorchPhases
from zcomm.shared import native

RESULTS = Path(__file__).resolve().parent / "results" / "signs.md"
PHASES = ("encode a worker's", "average and encode a server's", "decode", "all three")


def rounds_of(contenders: dict[str, SignPhases], values: Tensor, rounds: int) -> dict[str, list[list[float]]]:
    """Map each contender to seconds by round and phase, and "copy" to those of a copy."""
    size = next(iter(contenders.values())).layout.size
    found: dict[str, list[list[float]]] = {name: [] for name in (*contenders, "copy")}
    copied = torch.zeros_like(values)
    for index in range(rounds + 2):
        timed: dict[str, list[float]] = {"copy": [seconds(lambda: copied.copy_(values))]}
        for name, phases in contenders.items():
            sent = torch.zeros(size, phases.message_bytes, dtype=torch.uint8)
            worker = seconds(lambda phases=phases, sent=sent: phases.encode_worker([values], sent))
            received, own = sent[:1].repeat(size, 1), sent[0].clone()
            server = seconds(lambda phases=phases, got=received, own=own: phases.encode_server(got, own))
            gathered = own.repeat(size, 1)
            timed[name] = [
                *(worker, server),
                seconds(lambda phases=phases, all_=gathered, to=copied: phases.decode(all_, [to])),
            ]
            timed[name].append(sum(timed[name]))
        for name, times in timed.items():
            if index >= 2:
                found[name].append(times)
    return found


def seconds(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def report(found: dict[str, list[list[float]]], numel: int, level: str) -> list[str]:
    """Return the table."""
    ns = lambda times: 1e9 * statistics.median(times) / numel  # noqa: E731
    copies = [times[0] for times in found["copy"]]
    lines = [
        f"| phase | C ({level}), ns an element | torch, ns an element | torch / C | C / copy |",
        "|---|---:|---:|---:|---:|",
    ]
    for phase, label in enumerate(PHASES):
        ours, theirs = ([times[phase] for times in found[name]] for name in ("C", "torch"))
        ratio = statistics.median(b / a for a, b in zip(ours, theirs))
        to_copy = statistics.median(a / b for a, b in zip(ours, copies))
        lines.append(f"| {label} | {ns(ours):.2f} | {ns(theirs):.2f} | {ratio:.1f} | {to_copy:.2f} |")
    lines.append(f"| a copy of the whole | {ns(copies):.2f} | | | 1.00 |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=1 << 23)
    parser.add_argument("--tensors", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cut = [options.numel * index // options.tensors for index in range(options.tensors + 1)]
    layout = SignLayout.packed([hi - lo for lo, hi in itertools.pairwise(cut)], options.ranks)
    cpu = torch.device("cpu")
    contenders: dict[str, SignPhases] = {"C": KernelPhases(layout, 0, cpu), "torch": TorchPhases(layout, 0, cpu)}
    values = torch.randn(layout.buffers[0].numel, generator=torch.Generator().manual_seed(0))
    lines = report(rounds_of(contenders, values, options.rounds), options.numel, native.library().level())
    print("\n".join(lines))
    if options.save:
        load = os.getloadavg()[0]
        head = [
            "# Cost of sign codes",
            "",
            f"- date: {datetime.date.today()}",
            f"- machine: {platform.machine()}, {os.cpu_count()} cores, load average {load:.1f}; 1 thread",
            f"- versions: torch {torch.__version__}, zcomm {zcomm.__version__}",
            f"- command: `python packages/zcomm/bench/signs.py --numel {options.numel} --tensors {options.tensors} "
            f"--ranks {options.ranks} --rounds {options.rounds} --save`",
            "",
        ]
        RESULTS.write_text("\n".join([*head, *lines]) + "\n")


if __name__ == "__main__":
    main()
