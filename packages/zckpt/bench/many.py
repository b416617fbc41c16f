"""Benchmark of checkpoints of many small tensors, beside torch.save and torch.load.

    python packages/zckpt/bench/many.py FOLDER [--tensors 10000] [--rounds 15]

Prints the processor seconds of this process, the minimum of interleaved rounds: the cost is Python's, not the disk's.
"of torch" is the median of the ratios of each round, with its 95% interval (order statistics).  Half of the tensors
have 4 elements, half 16.  torch.load is timed without copying into live tensors.
"""

from __future__ import annotations

import argparse
import gc
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import zckpt


def cpu_s(work: Callable[[], object]) -> float:
    gc.collect()
    start = time.process_time()
    work()
    return time.process_time() - start


def median_and_interval(values: list[float]) -> str:
    """The median, and the order statistics that hold it in 95% of samples."""
    ordered, half = sorted(values), len(values) / 2
    reach = 0.98 * len(values) ** 0.5
    low, high = max(int(half - reach), 0), min(math.ceil(half + reach), len(values)) - 1
    return f"{statistics.median(values):.2f} ({ordered[low]:.2f} to {ordered[high]:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    state = {f"layers.{n}.weight": torch.rand(4, 4) if n % 2 else torch.rand(4) for n in range(options.tensors)}
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        root, file = Path(folder) / "zckpt", Path(folder) / "torch.pt"
        for _ in range(options.rounds):
            shutil.rmtree(root, ignore_errors=True)
            for name, work in {
                "zckpt save": lambda: zckpt.save(root, "a", tensors=state),
                "zckpt load": lambda: zckpt.load(root, tensors=state),
                "zckpt load, first": lambda: zckpt.load(root, tensors=state, verify="first"),
                "torch.save": lambda: torch.save(state, file),
                "torch.load": lambda: torch.load(file, weights_only=True),
            }.items():
                times.setdefault(name, []).append(cpu_s(work))
    print(f"| {options.tensors:,} tensors | CPU s | of torch |\n|---|---|---|")
    for name, seconds in times.items():
        peer = times["torch.save" if "save" in name else "torch.load"]
        ratio = median_and_interval([mine / theirs for mine, theirs in zip(seconds, peer)])
        print(f"| {name} | {min(seconds):.2f} | {ratio} |")


if __name__ == "__main__":
    main()
