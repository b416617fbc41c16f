"""A training step on CPU ranks: ours at each stage, DDP as the peer, and the same arithmetic without communication.

    .venv/bin/python packages/zengine/bench/step.py --ranks 2 --width 256 --blocks 6

All variants run interleaved in the same rank processes (A B C A B C), so that the machine's moods hit all alike; what
is printed is the median, and its ratio to the floor: forward, backward, clipping and a torch fused AdamW over the
parameters that a rank of that variant updates, with no message sent.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zcomm
import zengine
from zcomm.testing import run_ranks

VOCABULARY = 4096
Step = Callable[[torch.Tensor], None]


class Model(nn.Module):
    """MLP blocks over tied embeddings: matrix products of a GPT without its attention."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


def plain(model: nn.Module, *, share: int) -> Step:
    """No communication; the optimizer updates every `share`-th parameter, as a rank of a sharded run would."""
    optimizer = torch.optim.AdamW(list(model.parameters())[::share], lr=1e-4, fused=True)

    def step(tokens: torch.Tensor) -> None:
        model(tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()

    return step


def ddp(model: nn.Module) -> Step:
    """The peer."""
    return plain(DistributedDataParallel(model, gradient_as_bucket_view=True), share=1)


def ours(model: nn.Module, stage: int) -> Step:
    """The engine at one stage."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    engine, *_ = zengine.initialize(model=model, config=config)

    def step(tokens: torch.Tensor) -> None:
        engine.backward(engine(tokens))
        engine.step()

    return step


def measure(width: int, blocks: int, tokens: int, rounds: int) -> tuple[dict[str, float], int]:
    """Median milliseconds of each variant on this rank, and the number of parameters."""
    world_size = zcomm.group_size()
    made: dict[str, Step] = {
        "floor (nothing sent)": plain(Model(width, blocks), share=1),
        "floor, sharded update": plain(Model(width, blocks), share=world_size),
    }
    if world_size > 1:
        made["DDP + fused AdamW"] = ddp(Model(width, blocks))
    made |= {f"zengine stage {stage}": ours(Model(width, blocks), stage) for stage in (0, 1, 2)}
    batch = torch.randint(0, VOCABULARY, (1, tokens))
    times: dict[str, list[float]] = {name: [] for name in made}
    for index in range(rounds + 2):
        for name, step in made.items():
            zcomm.barrier()
            begin = time.perf_counter()
            step(batch)
            zcomm.barrier()
            if index >= 2:
                times[name].append(1e3 * (time.perf_counter() - begin))
    numel = sum(param.numel() for param in Model(width, blocks).parameters())
    return {name: statistics.median(values) for name, values in times.items()}, numel


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=128, help="of one rank's micro-batch")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    sizes = (options.width, options.blocks, options.tokens, options.rounds)
    medians, numel = run_ranks(measure, options.ranks, *sizes, timeout_s=600)[0]
    floor = medians["floor (nothing sent)"]
    sizes_text = f"{numel / 1e6:.1f}M parameters, {options.ranks} ranks, {options.tokens} tokens a rank"
    print(f"{sizes_text}, torch {torch.__version__}, {platform.machine()}")
    for name, milliseconds in medians.items():
        print(f"{name:24} {milliseconds:9.1f} ms   {milliseconds / floor:5.2f} x floor")


if __name__ == "__main__":
    main()
