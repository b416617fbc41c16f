#!/usr/bin/env python3
"""Bits per byte of DiLoCo against gradients in each step, at equal tokens and equal inner steps.

    python packages/zengine/bench/diloco_bits.py [--groups 2 4] [--steps N] [--start N] [--batch 8] [--rate 0.01]

The main job's GPT, small.  Every group trains on windows of its own; data parallelism on the same windows, whose
gradients are averaged in each step.  Learning rates are equal, and fall to 0 over all steps.  The first `--start`
steps are data parallelism in both (`diloco.start_step`).

One process plays all groups: AdamW of each group is torch's and keeps its state, outer steps are those of
`zpartition.rounds`.  That ranks of an engine compute the same, bit for bit, is shown by
packages/zengine/tests/features/test_local_rounds.py.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import sys
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn

from zpartition.rounds import RoundPolicy
from zpartition.rounds.exchange import outer_step

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
from train.model import GPT, Shape
from train.text import Corpus, read_corpus

Learner: TypeAlias = tuple[nn.Module, torch.optim.Optimizer]

HELD_OUT, PART = 1024, 128  # held-out windows, and as many at once
WARM_UP = 50  # steps


def windows(text: Tensor, count: int, context: int, seed: int) -> Tensor:
    """Return (count, context + 1) bytes."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - context, (count,), generator=generator)
    return text[starts[:, None] + torch.arange(context + 1)]


@torch.no_grad()
def bits_per_byte(model: nn.Module, text: Tensor, context: int) -> float:
    losses = [float(model.eval()(part)) for part in windows(text, HELD_OUT, context, 10**6).split(PART)]
    return statistics.fmean(losses) / math.log(2)


def rate(step: int, options: argparse.Namespace) -> float:
    """Return a rate that rises to `--rate`, then falls to 0 by a cosine."""
    total: int = options.steps
    highest: float = options.rate
    return highest * (1 + math.cos(math.pi * step / total)) / 2 * min(1.0, (step + 1) / WARM_UP)


def learner(model: nn.Module) -> Learner:
    """Return a model with AdamW."""
    return model, torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)


def copied(source: Learner) -> Learner:
    """Return a copy of weights and states."""
    model, optimizer = learner(copy.deepcopy(source[0]))
    optimizer.load_state_dict(copy.deepcopy(source[1].state_dict()))
    return model, optimizer


def train_step(one: Learner, batch: Tensor, lr: float) -> None:
    """Update by one clipped gradient."""
    model, optimizer = one
    for group in optimizer.param_groups:
        group["lr"] = lr
    model(batch).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def exchange(groups: list[Learner], start: list[Tensor], momentum: list[Tensor], policy: RoundPolicy) -> None:
    """Replace the weights of all groups by those after an outer step from `start`, which is updated."""
    local = [list(model.parameters()) for model, _ in groups]
    for index, (first, velocity) in enumerate(zip(start, momentum)):
        gradient = first - torch.stack([params[index] for params in local]).mean(0)
        outer_step(first, velocity, gradient, policy)
        for params in local:
            params[index].copy_(first)


def measure(
    shape: Shape, num_groups: int, seed: int, corpus: Corpus, options: argparse.Namespace
) -> tuple[float, float]:
    """Return bits per byte of data parallelism, and of DiLoCo."""
    total = options.steps

    def batches(step: int) -> Tensor:
        return windows(corpus.train, options.batch * num_groups, shape.context, 10_000 * seed + step)

    parallel = learner(GPT(shape, seed=seed))
    for step in range(options.start):
        train_step(parallel, batches(step), rate(step, options))
    groups = [copied(parallel) for _ in range(num_groups)]
    for step in range(options.start, total):
        train_step(parallel, batches(step), rate(step, options))
    policy = RoundPolicy(start=options.start, sync_every=options.every, lr=options.lr, momentum=options.momentum)
    start = [param.detach().clone() for param in groups[0][0].parameters()]
    momentum = [torch.zeros_like(each) for each in start]
    for step in range(options.start, total):
        for one, own in zip(groups, batches(step).chunk(num_groups)):
            train_step(one, own, rate(step, options))
        if policy.begins(step + 1) >= 0:
            exchange(groups, start, momentum, policy)
    (first, *_), text, context = groups[0], corpus.validation, shape.context
    return bits_per_byte(parallel[0], text, context), bits_per_byte(first, text, context)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--start", type=int, default=750)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--batch", type=int, default=8, help="windows of a group in a step")
    parser.add_argument("--rate", type=float, default=1e-2, help="the highest learning rate of AdamW, in both")
    parser.add_argument("--lr", type=float, default=0.7, help="of the outer step")
    parser.add_argument("--momentum", type=float, default=0.8, help="of the outer step")
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--context", type=int, default=64, help="bytes of a window")
    options = parser.parse_args()
    torch.set_num_threads(1)
    corpus = read_corpus()
    shape = Shape(depth=options.depth, width=options.width, heads=2, context=options.context)
    print(
        f"{GPT(shape).numel:,} parameters, {options.steps} steps, rounds of {options.every} from {options.start} on;"
    )
    print(f"{options.batch} windows of {options.context} bytes a group and step, learning rate {options.rate};")
    print(f"outer lr {options.lr}, Nesterov momentum {options.momentum}")
    print(f"{'groups':>6} {'seed':>5} {'each step':>10} {'diloco':>8} {'more':>7}")
    for num_groups in options.groups:
        for seed in options.seeds:
            parallel, local = measure(shape, num_groups, seed, corpus, options)
            row = f"{num_groups:>6} {seed:>5} {parallel:>10.4f} {local:>8.4f} {local / parallel - 1:>7.2%}"
            print(row, flush=True)


if __name__ == "__main__":
    main()
