"""What an accumulation boundary costs on many small tensors: `engine.step()` against its floor and torch's loop.

    python packages/zengine/bench/boundary.py [--total 1000000] [--rounds 40]

A model of 292 parameters (the shapes of GPT-2 with 24 layers, scaled), world 1, float32, clipping, AdamW.  Backward
is not measured.  The boundary is everything after it: norm, clipping, update, `zero_grad`; for torch
`clip_grad_norm_` (foreach), the fused AdamW and `zero_grad`.  The floor (zoptim's bench/floors.c) reads the gradients
and moves the bytes of an update.  Variants take turns in one process; printed are medians and minima in microseconds.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import zengine

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "zoptim" / "bench"))
from arena import numels_of
from floors import cpu_floor

CLIP, LR, DECAY = 1.0, 1e-3, 0.01
CALLS = 4  # of a variant, one after the other; the first is not counted
Measure = Callable[[], float]  # one boundary; returns seconds


class Many(nn.Module):
    """Parameters of given sizes, all of which the loss reads."""

    def __init__(self, numels: tuple[int, ...]) -> None:
        super().__init__()
        self.params = nn.ParameterList([nn.Parameter(torch.randn(numel) * 0.02) for numel in numels])

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        return torch.stack([(param * scale).sum() for param in self.params]).sum()


def ours(numels: tuple[int, ...], stage: int) -> Measure:
    config = {
        "train_batch_size": 1,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY}},
        "zero_optimization": {"stage": stage},
    }
    engine, scale = zengine.initialize(model=Many(numels), config=config)[0], torch.ones(1)
    return after(lambda: engine.backward(engine(scale)), engine.step)


def plain(numels: tuple[int, ...]) -> Measure:
    model, scale = Many(numels), torch.ones(1)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=LR, weight_decay=DECAY, fused=True)

    def boundary() -> None:
        nn.utils.clip_grad_norm_(params, CLIP, foreach=True)
        optimizer.step()
        optimizer.zero_grad()

    return after(lambda: model(scale).backward(), boundary)


def after(before: Callable[[], object], measured: Callable[[], object]) -> Measure:
    def measure() -> float:
        before()
        begin = time.perf_counter()
        measured()
        return time.perf_counter() - begin

    return measure


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total", type=int, default=1_000_000, help="elements of all tensors")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    numels = numels_of("gpt2", options.total)
    streams = [[torch.zeros(numel) for numel in numels] for _ in range(4)]
    variants = {
        "floor": after(lambda: None, cpu_floor("clip", streams)),
        "engine, stage 0": ours(numels, 0),
        "engine, stage 2": ours(numels, 2),
        "torch: clip, fused AdamW": plain(numels),
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(options.rounds):
        for name, measure in variants.items():
            seconds[name] += [measure() for _ in range(CALLS)][1:]
    print("|  | us | least | x floor | x floor, least |\n| --- | ---: | ---: | ---: | ---: |")
    for name, found in seconds.items():
        pairs = [(reduce(found), reduce(seconds["floor"])) for reduce in (statistics.median, min)]
        cells = [f"{own * 1e6:.0f}" for own, _ in pairs] + [f"{own / floor:.2f}" for own, floor in pairs]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
