"""Cost of exact rollouts in training, on CPU ranks.

    .venv/bin/python packages/zengine/bench/exact.py --ranks 2 --width 256 --blocks 4

Training steps with exact blocks and without run in turns (A B A B), at stages 0 and 3, in float32 and bfloat16; what
is printed is the median of their ratios.  rollouts.py measures what else rollouts cost.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import zcomm
import zengine
from zcomm.testing import run_ranks
from zengine.rollout import RolloutConfig, SamplingConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
from train.model import GPT, Shape

TIME = 128


class Model(GPT):
    """The main job's model; its forward returns scores."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the scores of the next byte: (batch, time, 256)."""
        return self.logits(tokens)


def engine_of(width: int, blocks: int, stage: int, *, is_bf16: bool = False) -> Any:
    """Return a hybrid engine over a new model."""
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": is_bf16},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "hybrid_engine": {"enabled": True, "max_out_tokens": TIME},
    }
    model = Model(Shape(depth=blocks, width=width, heads=width // 64, context=TIME))
    return zengine.initialize(model=model, config=config)[0]


def seconds(work: Callable[[], object]) -> float:
    """Return the time of `work` on the slowest rank."""
    zcomm.barrier()
    begin = time.perf_counter()
    work()
    zcomm.barrier()
    return time.perf_counter() - begin


def ratio(one: Callable[[], object], other: Callable[[], object], rounds: int) -> float:
    """Return the median of one / other, run in turns; two rounds warm up."""
    found = [seconds(one) / seconds(other) for _ in range(rounds + 2)]
    return statistics.median(found[2:])


def step_ratio(width: int, blocks: int, rounds: int, stage: int, is_bf16: bool) -> float:
    """Return exact over plain training steps."""
    engines = [engine_of(width, blocks, stage, is_bf16=is_bf16) for _ in range(2)]
    few = SamplingConfig(max_new_tokens=2)
    engines[0].rollout([[1, 2]], n=1, sampling=few, config=RolloutConfig(exact=True))  # exact from here on
    ids = torch.randint(0, 256, (4, TIME), generator=torch.Generator().manual_seed(zcomm.group_rank()))

    def step(engine: Any) -> None:
        loss = F.cross_entropy(engine(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())
        engine.backward(loss)
        engine.step()

    found = ratio(lambda: step(engines[0]), lambda: step(engines[1]), rounds)
    for engine in engines:
        engine.close()
    return found


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    sizes = (options.width, options.blocks, options.rounds)
    for stage in (0, 3):
        for is_bf16 in (False, True):
            found = run_ranks(step_ratio, options.ranks, *sizes, stage, is_bf16, timeout_s=900)[0]
            print(f"step, exact / plain, stage {stage}, {'bf16' if is_bf16 else 'fp32'}: {found:.3f}")


if __name__ == "__main__":
    main()
