#!/usr/bin/env python3
"""Bits per byte with progressive layer drop, for ways to choose the layers of a step that the law allows.

    python packages/zengine/bench/layer_drop_bits.py [--depth 12] [--steps 600] [--theta 0.5] [--gamma 0.01]

In each way layer i of L is kept with probability 1 - (i / L) (1 - theta(t)), and a skipped layer gets no update:

    all     without layer drop
    micro   all layers of a micro-step, of which a step has two, compare with one number, as in zengine
    step    all layers of a step do, as in a pipeline of zengine
    each    each layer of a step has a number of its own (Zhang and He 2020, algorithm 1)
    whole   as micro, but only micro-steps that run the whole model train it; the others cost nothing

The main job's GPT on its text, in one process without an engine.  Evaluation runs every layer.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import torch
from diloco_bits import bits_per_byte, learner, rate, windows
from torch import Tensor, nn

from zengine.features.layer_drop import is_kept, theta_at

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
from train.model import GPT, Shape
from train.text import Corpus, read_corpus

# From seed, step, micro-step and the probability of each layer to the layers that run
Choice: TypeAlias = Callable[[int, int, int, list[float]], list[bool]]


CHOICES: dict[str, Choice] = {
    "all": lambda seed, step, micro, kept: [True] * len(kept),
    "micro": lambda seed, step, micro, kept: [is_kept(seed, step, each, micro / 2) for each in kept],
    "step": lambda seed, step, micro, kept: [is_kept(seed, step, each) for each in kept],
    "each": lambda seed, step, micro, kept: [
        random.Random(f"{seed} {step} {layer}").random() < each for layer, each in enumerate(kept)
    ],
    "whole": lambda seed, step, micro, kept: [is_kept(seed, step, min(kept), micro / 2)] * len(kept),
}


class Skipping(nn.Module):
    """A block that runs while `runs` is true, and in evaluation."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.runs = block, True

    def forward(self, hidden: Tensor, *others: object) -> Tensor:
        return self.block(hidden, *others) if self.runs or not self.training else hidden


def trained(choose: Choice, shape: Shape, corpus: Corpus, seed: int, options: argparse.Namespace) -> nn.Module:
    """Return a trained model; a step has two micro-steps, with half of its windows each."""
    model = GPT(shape, seed=seed)
    model.blocks = nn.ModuleList(map(Skipping, model.blocks))
    _, optimizer = learner(model)
    for step in range(options.steps):
        theta = theta_at(max(step - 1, 0), options.theta, options.gamma)
        kept = [1.0 - layer / shape.depth * (1.0 - theta) for layer in range(shape.depth)]
        batch = windows(corpus.train, options.batch, shape.context, 10**7 * seed + step)
        chosen = [(half, choose(seed, step, micro, kept)) for micro, half in enumerate(batch.chunk(2))]
        trains = [(half, runs) for half, runs in chosen if any(runs)]
        for half, runs in trains:
            for block, is_run in zip(model.blocks, runs):
                block.runs = is_run
            (model.train()(half) / len(trains)).backward()
        for group in optimizer.param_groups:
            group["lr"] = rate(step, options)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--choices", nargs="+", choices=list(CHOICES), default=list(CHOICES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--context", type=int, default=64, help="bytes of a window")
    parser.add_argument("--batch", type=int, default=16, help="windows of a step")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rate", type=float, default=3e-3, help="the highest learning rate of AdamW")
    parser.add_argument("--theta", type=float, default=0.5)
    parser.add_argument("--gamma", type=float, default=0.01)
    options = parser.parse_args()
    torch.set_num_threads(1)
    corpus = read_corpus()
    shape = Shape(depth=options.depth, width=options.width, heads=2, context=options.context)
    print(f"{'seed':>4} {'choice':>7} {'bits/byte':>10} {'to the first':>13}")
    for seed in options.seeds:
        first = 0.0
        for name in options.choices:
            model = trained(CHOICES[name], shape, corpus, seed, options)
            bits = bits_per_byte(model, corpus.validation, shape.context)
            first = first or bits
            print(f"{seed:>4} {name:>7} {bits:>10.4f} {bits / first - 1:>+13.2%}", flush=True)


if __name__ == "__main__":
    main()
