#!/usr/bin/env python3
"""Step time with sections that are off, beside a config without them: paired, interleaved, one process.

    python packages/zengine/bench/off.py [--pairs 400] [--seed 0]

Two engines over equal models: one without the sections, one with all of diloco, progressive_layer_drop,
compression_training, quantize_training, eigenvalue, sparse_attention, elasticity and autotuning present and off.
1-bit optimizers have no section; both use AdamW.  Each pair runs a step of both, in an order that a seed draws;
losses must be equal bit for bit.  Printed: the median ratio of the pairs, and its interval of 95% by the bootstrap.
A control compares two engines without the sections.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import models
import torch

import zengine

SHAPE = models.Shape(depth=4, width=64, heads=4, vocabulary=256, context=64)
OFF: dict[str, Any] = {
    "diloco": {"sync_every": 0},
    "progressive_layer_drop": {"enabled": False},
    "compression_training": {
        "weight_quantization": {"shared_parameters": {"enabled": False}},
        "activation_quantization": {"shared_parameters": {"enabled": False}},
        "sparse_pruning": {"shared_parameters": {"enabled": False}},
        "row_pruning": {"shared_parameters": {"enabled": False}},
        "head_pruning": {"shared_parameters": {"enabled": False}},
        "channel_pruning": {"shared_parameters": {"enabled": False}},
        "layer_reduction": {"enabled": False},
    },
    "quantize_training": {"enabled": False},
    "eigenvalue": {"enabled": False},
    "sparse_attention": {"mode": "fixed"},
    "elasticity": {"enabled": False, "max_train_batch_size": 64, "micro_batch_sizes": [1, 2]},
    "autotuning": {"enabled": False},
}


def engine_of(sections: dict[str, Any]) -> zengine.Engine:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        **sections,
    }
    return zengine.initialize(model=models.GPT(SHAPE), config=config)[0]


def step(engine: zengine.Engine, tokens: torch.Tensor) -> tuple[float, float]:
    """Return seconds and loss."""
    began_s = time.perf_counter()
    loss = engine(tokens)
    engine.backward(loss)
    engine.step()
    return time.perf_counter() - began_s, float(loss.detach())


def ratios(first: dict[str, Any], second: dict[str, Any], pairs: int, draw: random.Random) -> list[float]:
    """Return second / first of each pair of steps."""
    engines, found = [engine_of(first), engine_of(second)], []
    for index in range(pairs + 20):
        tokens = torch.randint(256, (1, SHAPE.context), generator=torch.Generator().manual_seed(index))
        order = draw.sample((0, 1), 2)
        results = {which: step(engines[which], tokens) for which in order}
        if results[0][1] != results[1][1]:
            raise RuntimeError(f"losses differ in step {index}: {results[0][1]} and {results[1][1]}")
        if index >= 20:
            found.append(results[1][0] / results[0][0])
    for engine in engines:
        engine.close()
    return found


def interval(values: list[float], draw: random.Random) -> tuple[float, float, float]:
    """Return the median, and the interval of 95% of resampled medians."""
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return statistics.median(values), medians[50], medians[-51]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    draw = random.Random(options.seed)
    print(f"{'with / without':<24} {'median':>8} {'95% interval':>18}")
    for name, sections in (("all sections off", OFF), ("control: none", {})):
        middle, low, high = interval(ratios({}, sections, options.pairs, draw), draw)
        print(f"{name:<24} {middle:>8.4f} {f'{low:.4f} to {high:.4f}':>18}")


if __name__ == "__main__":
    main()
