#!/usr/bin/env python3
"""FLOPs that progressive layer drop leaves, counted in every step of a run, beside its law.

    python packages/zengine/bench/layer_drop.py [--steps 1000] [--gammas 0.001 0.01] [--theta 0.5]

Trains a small GPT of 12 blocks on one CPU rank; torch's FLOP counter runs around forward and backward of each step.
A block's share is that of the FLOPs that depend on blocks, and the law's the mean over steps t and layers i of
1 - (i / L) (1 - theta(t)).
"""

from __future__ import annotations

import argparse
import math

import models
import torch
from torch.utils.flop_counter import FlopCounterMode

import zengine
from zengine.features.layer_drop import theta_at

SHAPE = models.Shape(depth=12, width=32, heads=2, vocabulary=64, context=16)


def counted(steps: int, theta: float, gamma: float) -> list[int]:
    """Return the FLOPs of each step."""
    torch.set_num_threads(1)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "progressive_layer_drop": {"enabled": True, "theta": theta, "gamma": gamma, "layers": "blocks"},
    }
    engine = zengine.initialize(model=models.GPT(SHAPE), config=config)[0]
    found = []
    for step in range(steps):
        tokens = torch.randint(64, (1, SHAPE.context), generator=torch.Generator().manual_seed(step))
        with FlopCounterMode(display=False) as counter:
            engine.backward(engine(tokens))
        engine.step()
        found.append(counter.get_total_flops())
    engine.close()
    return found


def without_blocks() -> int:
    """Return the FLOPs of a step of the model without blocks."""
    model = models.GPT(models.Shape(depth=0, width=32, heads=2, vocabulary=64, context=16))
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, SHAPE.context, dtype=torch.int64)).backward()
    return int(counter.get_total_flops())


def law(steps: int, theta: float, gamma: float) -> float:
    """Return the mean share of layers that run."""
    shares = (
        1 - layer / SHAPE.depth * (1 - theta_at(max(step - 1, 0), theta, gamma))
        for step in range(steps)
        for layer in range(SHAPE.depth)
    )
    return math.fsum(shares) / (steps * SHAPE.depth)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--gammas", type=float, nargs="+", default=[0.001, 0.01])
    parser.add_argument("--theta", type=float, default=0.5)
    options = parser.parse_args()
    rest = without_blocks()
    print(f"{'theta':>6} {'gamma':>6} {'steps':>6} {'law':>8} {'counted':>8} {'difference':>10} {'whole model':>12}")
    for gamma in options.gammas:
        flops = counted(options.steps, options.theta, gamma)
        full = flops[0]  # theta is 1 in the first step
        share = sum(each - rest for each in flops) / (len(flops) * (full - rest))
        expected, whole = law(options.steps, options.theta, gamma), sum(flops) / (len(flops) * full)
        print(
            f"{options.theta:>6g} {gamma:>6g} {options.steps:>6} {expected:>8.4f} {share:>8.4f} "
            f"{share - expected:>+10.4f} {whole:>12.4f}"
        )


if __name__ == "__main__":
    main()
