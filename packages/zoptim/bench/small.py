#!/usr/bin/env python3
"""What a step costs beside its arithmetic: lists of small tensors with warm caches, and the norm of large gradients.

    python packages/zoptim/bench/small.py            AdamW, 1M float32 in 292 tensors; a norm of 100M bf16
    python packages/zoptim/bench/small.py --total 100k --norm 1M --rounds 5

Parts of one loop take turns in one process: the step over the gradients of the last one, over new ones, the norm with
its divisor, and the whole boundary (norm, clipping, step, `zero_grad`).  Gradients are assigned outside the measured
time.  The floors move the same bytes, see floors.c.  Prints a Markdown table of medians and minima.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import machine
import torch
from arena import Arena, numels_of
from contenders import BETAS, DECAY, EPS, LR, MAX_NORM, Step
from floors import cpu_floor
from torch import Tensor

import zoptim

CALLS = 5  # of a part, one after the other, in a round


def main(arguments: Sequence[str] | None = None) -> int:
    """Phases: the small list, the large norm; each with its floor and torch's way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total", type=_count, default="1M", help="elements of the list (1M)")
    parser.add_argument("--norm", type=_count, default="100M", help="elements of the large gradient (100M)")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args(arguments)
    for name, value in machine.facts(torch.device("cpu")).items():
        print(f"- {name}: {value}")
    report(f"AdamW, float32, {options.total:,} elements in 292 tensors", _list_parts(options.total), options.rounds)
    report(f"norm of {options.norm:,} bf16 elements", _norm_parts(options.norm), max(3, options.rounds // 4))
    return 0


class Part:
    """A measured call, after a call that is not measured."""

    def __init__(self, floor: str, run: Step, before: Step = lambda: None) -> None:
        self.floor, self.run, self.before = floor, run, before
        self.seconds: list[float] = []

    def measure(self) -> None:
        for _ in range(CALLS):
            self.before()
            begin = time.perf_counter()
            self.run()
            self.seconds.append(time.perf_counter() - begin)


def report(title: str, parts: dict[str, Part], rounds: int) -> None:
    """Measure the parts in turn and print a table."""
    for number in range(rounds + 1):
        for part in parts.values():
            part.measure()
            if not number:  # plans and memory are made
                part.seconds.clear()
    print(f"\n## {title}\n\n|  | us | least | x floor | x floor, least |\n| --- | ---: | ---: | ---: | ---: |")
    for name, part in parts.items():
        figures = [(reduce(part.seconds), reduce(parts[part.floor].seconds)) for reduce in (statistics.median, min)]
        cells = [f"{own * 1e6:.1f}" for own, _ in figures] + [f"{own / floor:.2f}" for own, floor in figures]
        print(f"| {name} | {' | '.join(cells)} |")


def _list_parts(total: int) -> dict[str, Part]:
    arena = Arena(numels_of("gpt2", total), torch.device("cpu"))
    sets = [arena.get("grad"), [torch.randn_like(grad) for grad in arena.get("grad")]]
    ours, peers = arena.with_grads("weight", "grad"), arena.with_grads("weight", "grad")
    optimizer = zoptim.AdamW(ours, LR, BETAS, EPS, DECAY)
    fused = torch.optim.AdamW(peers, LR, BETAS, EPS, DECAY, fused=True)
    optimizer.step()
    moments = [[optimizer.state[param][name] for param in ours] for name in ("exp_avg", "exp_avg_sq")]
    streams = [arena.get("weight"), sets[0], *moments]

    def boundary(measure: Callable[[], zoptim.GradStats]) -> None:
        stats = measure()
        optimizer.grad_scale, optimizer.found_inf = stats.divisor(max_norm=MAX_NORM), stats.found_inf
        optimizer.step()
        optimizer.zero_grad()

    def by_list() -> None:
        boundary(lambda: zoptim.grad_stats(param.grad for param in ours))

    def by_optimizer() -> None:
        boundary(optimizer.grad_stats)

    def torch_boundary() -> None:
        torch.nn.utils.clip_grad_norm_(peers, MAX_NORM)
        fused.step()
        fused.zero_grad()

    same, new = _assigner(ours, sets[:1]), _assigner(ours, sets)
    return {
        "floor": Part("floor", cpu_floor("adam", streams)),
        "ours, the same gradients": Part("floor", optimizer.step, same),
        "ours, new gradients": Part("floor", optimizer.step, new),
        "torch fused": Part("floor", fused.step, _assigner(peers, sets[:1])),
        "floor with a norm": Part("floor with a norm", cpu_floor("clip", streams)),
        "ours, whole boundary": Part("floor with a norm", by_list, new),
        "ours, whole boundary, optimizer.grad_stats": Part("floor with a norm", by_optimizer, new),
        "torch clip and fused": Part("floor with a norm", torch_boundary, _assigner(peers, sets)),
        "ours, norm and divisor": Part(
            "floor with a norm", lambda: zoptim.grad_stats(sets[0]).divisor(max_norm=MAX_NORM)
        ),
    }


def _assigner(params: Sequence[Tensor], sets: Sequence[Sequence[Tensor]]) -> Step:
    """Return a call that assigns the next set of gradients; the same objects are not assigned again."""
    count = 0

    def assign() -> None:
        nonlocal count
        count += 1
        for param, grad in zip(params, sets[count % len(sets)]):
            if param.grad is not grad:
                param.grad = grad

    return assign


def _norm_parts(numel: int) -> dict[str, Part]:
    grads = Arena((numel,), torch.device("cpu")).get("grad", torch.bfloat16)
    torch_norm: Callable[[Sequence[Tensor]], Tensor] = torch.nn.utils.get_total_norm
    return {
        "one read": Part("one read", cpu_floor("norm", [grads])),
        "ours": Part("one read", lambda: zoptim.grad_stats(grads)),
        "torch": Part("one read", lambda: torch_norm(grads)),
    }


def _count(word: str) -> int:
    """'10M' -> 10000000."""
    unit = {"k": 10**3, "M": 10**6}.get(word[-1:], 1)
    return int(float(word[:-1] if unit > 1 else word) * unit)


if __name__ == "__main__":
    sys.exit(main())
