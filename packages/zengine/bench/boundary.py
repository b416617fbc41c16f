"""What an accumulation boundary costs on many small tensors: `engine.step()` against its floor and its peers.

    python packages/zengine/bench/boundary.py [--total 1000000] [--rounds 40] [--ranks 2] [--deepspeed FOLDER]

A model of 292 parameters (the shapes of GPT-2 with 24 layers, scaled), float32, clipping, AdamW.  Backward is not
measured; the boundary is everything after it: norm, clipping, update, `zero_grad`; among ranks also the messages that
`step` sends.  The peers are torch's bare loop (`clip_grad_norm_` with foreach, the fused AdamW, `zero_grad`), which
sends nothing, and DeepSpeed's `engine.step()`, if it can be imported (`--deepspeed` is a folder to import it from).

The floor (zoptim's bench/floors.c) reads the gradients and moves the bytes of an update in one call each, over the
model's own tensors after the same backward: what it finds in the caches is what the others find.  "Without a list" is
the engine with one parameter of 8 elements, "without bytes" with 292 of 8: the Python of the calls, and of the list.

Variants take turns in one process on each rank.  Printed are medians and minima in microseconds, the median ratio to
the floor of the same round, and the ratio of the minima.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import logging
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zengine
from zcomm.testing import run_ranks

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "zoptim" / "bench"))
from arena import numels_of
from floors import cpu_floor

CLIP, LR, DECAY = 1.0, 1e-3, 0.01
FLOOR = "floor"
CALLS = 4  # of a variant, one after the other; the first is not counted
SMALL = 8  # elements of a parameter without bytes
Measure = Callable[[], float]  # one boundary; returns seconds


class Many(nn.Module):
    """Parameters of given sizes, all of which the loss reads."""

    def __init__(self, numels: tuple[int, ...]) -> None:
        super().__init__()
        self.params = nn.ParameterList([nn.Parameter(torch.randn(numel) * 0.02) for numel in numels])

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        return torch.stack([(param * scale).sum() for param in self.params]).sum()


def config_of(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY}},
        "zero_optimization": {"stage": stage},
    }


def ours(numels: tuple[int, ...], stage: int) -> Measure:
    engine, scale = zengine.initialize(model=Many(numels), config=config_of(stage))[0], torch.ones(1)
    return after(lambda: engine.backward(engine(scale)), engine.step)


def deepspeed(numels: tuple[int, ...], stage: int) -> Measure:
    """With its own fused Adam, which it compiles for CPUs."""
    peer, scale = importlib.import_module("deepspeed"), torch.ones(1)
    engine = peer.initialize(model=Many(numels), config=config_of(stage))[0]
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


def floor(numels: tuple[int, ...]) -> Measure:
    """The bytes of the boundary, over gradients that a backward has just written."""
    model, scale = Many(numels), torch.ones(1)
    params = list(model.parameters())
    for param in params:
        param.grad = torch.zeros_like(param)
    grads = [param.grad for param in params]
    moments = [[torch.zeros(numel) for numel in numels] for _ in range(2)]
    move = cpu_floor("clip", [[param.detach() for param in params], grads, *moments])

    def backward() -> None:
        torch._foreach_zero_(grads)  # in place of `zero_grad`, which the boundary of the others includes
        model(scale).backward()

    return after(backward, move)


def after(before: Callable[[], object], measured: Callable[[], object]) -> Measure:
    def measure() -> float:
        before()
        begin = time.perf_counter()
        measured()
        return time.perf_counter() - begin

    return measure


def measure(total: int, rounds: int, folder: str) -> dict[str, list[float]]:
    """Return the seconds of each variant on this rank, in the order of the rounds."""
    logging.disable(logging.WARNING)
    if folder:
        sys.path.append(folder)
    numels = numels_of("gpt2", total)
    bare = (SMALL,) * len(numels)
    variants: dict[str, Measure] = {FLOOR: floor(numels), "torch: clip, fused AdamW": plain(numels)}
    for stage in (0, 1, 2):
        variants[f"engine, stage {stage}"] = ours(numels, stage)
    variants["engine, stage 0, without bytes"] = ours(bare, 0)
    variants["engine, stage 0, without a list"] = ours((SMALL,), 0)
    if importlib.util.find_spec("deepspeed") is not None:
        variants |= {f"DeepSpeed, stage {stage}": deepspeed(numels, stage) for stage in (0, 2)}
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, each in variants.items():
            seconds[name] += [each() for _ in range(CALLS)][1:]
    return seconds


def report(seconds: dict[str, list[float]]) -> None:
    """Print a table."""
    print("|  | us | least | x floor | x floor, least |\n| --- | ---: | ---: | ---: | ---: |")
    floors = seconds[FLOOR]
    for name, found in seconds.items():
        ratios = statistics.median(a / b for a, b in zip(found, floors)), min(found) / min(floors)
        micros = (f"{reduce(found) * 1e6:.0f}" for reduce in (statistics.median, min))
        print(f"| {name} | {' | '.join(micros)} | {ratios[0]:.2f} | {ratios[1]:.2f} |")


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total", type=int, default=1_000_000, help="elements of all tensors")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--deepspeed", default="", metavar="FOLDER", help="where to import DeepSpeed from")
    options = parser.parse_args()
    given = options.total, options.rounds, options.deepspeed
    if options.ranks == 1 and not options.deepspeed:
        report(measure(*given))
    else:
        report(run_ranks(measure, options.ranks, *given, timeout_s=600)[0])


if __name__ == "__main__":
    main()
