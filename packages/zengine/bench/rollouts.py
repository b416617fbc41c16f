"""Rollouts on CPU ranks: the switch to generation at stage 3, refilled slots, and prompts that samples share.

    .venv/bin/python packages/zengine/bench/rollouts.py --rounds 15

Switch: gathering the model's weights and building the decoder over them, over plain all-gathers of the same sizes, in
turns with it; at three sizes of model.  The all-gathers write into buffers that stay, or into new ones each time: a
switch that holds no memory between rollouts cannot cost less than those.

Refilled slots: samples whose mean length is 0.4 of the longest, over 4 slots, against static batches as peers run
them: a batch keeps its 4 rows until its longest sample has ended.  Static batches that drop rows as they end are
printed, too: where a step costs in proportion to its rows, they waste no work.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import zcomm
from zcomm.testing import run_ranks
from zengine.inference.generation import Request, generate
from zengine.rollout import RolloutConfig, SamplingConfig
from zpartition.memory.buffers import BufferPool

sys.path.insert(0, str(Path(__file__).resolve().parent))
from exact import engine_of, ratio, seconds

LENGTHS = [50, 5, 10, 15] * 4  # of samples: mean / longest = 0.4
SLOTS = 4


def switch_ratios(width: int, blocks: int, rounds: int) -> tuple[float, float, float]:
    """Return a switch at stage 3 over all-gathers into buffers that stay, and into new ones; and the bytes in MB."""
    engine = engine_of(width, blocks, 3)
    engine.rollout([[1, 2]], n=1, sampling=SamplingConfig(max_new_tokens=2))  # recognizes the decoder
    storages = [each for unit in engine.parts.partition.unsharder.units.values() for each in unit.storages]
    size = zcomm.group_size()
    shards = [zcomm.shared_empty(each.bucket.numel // size, torch.float32) for each in storages]
    wholes = [torch.empty(each.bucket.numel) for each in storages]

    def switch() -> None:
        with engine.opened():
            engine._rollouts.weights.present_decoder()

    def gather() -> None:
        for whole, shard in zip(wholes, shards):
            zcomm.all_gather(whole, shard)

    def gather_anew() -> None:
        pool = BufferPool(torch.device("cpu"))
        for whole, shard in zip([pool.obtain(each.numel(), torch.float32) for each in wholes], shards):
            zcomm.all_gather(whole, shard)

    found = ratio(switch, gather, rounds), ratio(switch, gather_anew, rounds)
    engine.close()
    return *found, sum(whole.numel() for whole in wholes) * 4 / 1e6


def refill_ratios(width: int, blocks: int, rounds: int) -> tuple[float, float, float]:
    """Return static batches, and static ones that drop rows, over refilled slots; and millions of weights."""
    engine = engine_of(width, blocks, 0)
    greedy = [SamplingConfig(length, temperature=0).rule() for length in LENGTHS]
    requests = [Request(prompt=(1 + index, 3), sampling=rule) for index, rule in enumerate(greedy)]
    batches = [requests[start : start + SLOTS] for start in range(0, len(requests), SLOTS)]
    with engine.opened():
        steps = engine._rollouts.weights.steps(SLOTS)

        def static() -> None:
            slots = range(SLOTS)
            for batch in batches:
                prompts = [torch.tensor(each.prompt) for each in batch]
                logits = torch.stack([steps.forward(prompt, slot) for slot, prompt in zip(slots, prompts)])
                for _ in range(max(each.sampling.max_new_tokens for each in batch) - 1):
                    logits = steps.forward_each(logits.argmax(-1), slots)
                for slot in slots:
                    steps.cache.clear(slot)

        def dropping() -> None:
            for batch in batches:
                generate(steps, batch)

        def refilled() -> None:
            generate(steps, requests)

        works: list[Callable[[], object]] = [static, dropping, refilled]
        times = [[seconds(work) for work in works] for _ in range(max(rounds // 3, 3))][1:]
    numel = sum(param.numel() for param in engine.module.parameters())
    engine.close()
    of_static, of_dropping = (statistics.median(row[at] / row[2] for row in times) for at in (0, 1))
    return of_static, of_dropping, numel / 1e6


def prefill_ratio(width: int, blocks: int, rounds: int) -> float:
    """Return the prefill of 8 prompts over that of one prompt for 8 samples."""
    engine = engine_of(width, blocks, 0)
    rule, config = SamplingConfig(max_new_tokens=1), RolloutConfig(num_slots=SLOTS, compare=0)
    one, many = [list(range(100))], [[index, *range(99)] for index in range(8)]

    def prefill(prompts: list[list[int]], n: int) -> None:
        engine.rollout(prompts, n=n, sampling=rule, config=config)

    found = ratio(lambda: prefill(many, 1), lambda: prefill(one, 8), rounds)
    engine.close()
    return found


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    for width in (256, 512, 1024):
        kept, fresh, megabytes = run_ranks(switch_ratios, options.ranks, width, 4, options.rounds, timeout_s=900)[0]
        print(f"switch at stage 3 / all-gathers of its {megabytes:.1f} MB: {kept:.2f}; into new memory: {fresh:.2f}")
        sys.stdout.flush()
    for width, blocks in ((256, 4), (768, 8)):
        static, dropping, millions = run_ranks(refill_ratios, 1, width, blocks, options.rounds, timeout_s=900)[0]
        model = f"{millions:.0f}M weights, mean / longest = 0.4"
        print(f"static batches / refilled slots, {model}: {static:.2f}")
        print(f"static batches that drop rows / refilled slots, {model}: {dropping:.2f}", flush=True)
    shared = run_ranks(prefill_ratio, 1, 256, 4, options.rounds, timeout_s=900)[0]
    print(f"prefill of 8 prompts / of one prompt for 8 samples: {shared:.2f}")


if __name__ == "__main__":
    main()
