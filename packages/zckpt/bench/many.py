"""Benchmark of checkpoints of many small tensors, beside torch.save and torch.load.

    python packages/zckpt/bench/many.py FOLDER [--tensors 10000] [--rounds 5]

Prints the processor seconds of this process, the minimum of interleaved rounds: the cost is Python's, not the disk's.
Half of the tensors have 4 elements, half 16.  torch.load is timed without copying into live tensors.
"""

from __future__ import annotations

import argparse
import gc
import shutil
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    state = {f"layers.{n}.weight": torch.rand(4, 4) if n % 2 else torch.rand(4) for n in range(options.tensors)}
    best: dict[str, float] = {}
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
                best[name] = min(best.get(name, float("inf")), cpu_s(work))
    print(f"| {options.tensors:,} tensors | CPU s |\n|---|---|")
    for name, seconds in best.items():
        print(f"| {name} | {seconds:.2f} |")


if __name__ == "__main__":
    main()
