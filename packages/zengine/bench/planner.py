#!/usr/bin/env python3
"""The planner against measurement: the peak of a rank, predicted and real, over 20 configurations on the CPU.

    python packages/zengine/bench/planner.py                 all, into results/planner-cpu.md
    python packages/zengine/bench/planner.py --only 3,15     some, printed only

Predicted is what `zengine plan` says: `zpartition.plan` and a dry run of the model, without memory.  Measured is the
kernel's count of resident anonymous and shared pages of a rank (shared ones once), at most, in a warm step, beyond
what the process had before the model was made: `zengine.planning.measured` says why.  Each configuration has fresh
processes.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import itertools
import platform
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import zcomm
import zengine
from zcomm.testing import end_ranks, run_ranks
from zengine.config import Facts, load, resolve
from zengine.planning.measured import measure
from zengine.planning.models import Layer, Shape, Transformer, shaped_batches, token_batches
from zengine.planning.sizes import Workload, peak

RESULTS = Path(__file__).resolve().parent / "results"
MIB = 2**20
SHAPE = Shape(layers=4, width=512, vocabulary=4000)


class Again(Transformer):
    """The transformer with its layers' activations made again in backward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.layers = nn.ModuleList(Recomputed(shape.width) for _ in range(shape.layers))


class Recomputed(Layer):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return result


class Wide(nn.Module):
    """Much weight, little activation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2048, 2048) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.layers[0].weight.dtype)
        for layer in self.layers:
            x = functional.gelu(layer(x))
        return x.float().square().mean()


class Convolutions(nn.Module):
    """Little weight, much activation."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (3, 32, 64, 128, 256)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(8, b), nn.ReLU(), nn.MaxPool2d(2))
            for a, b in itertools.pairwise(sizes)
        )
        self.head = nn.Linear(256, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.head.weight.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3))).float().logsumexp(-1).mean()


MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "transformer": (lambda: Transformer(SHAPE), token_batches(256)),
    "recomputed": (lambda: Again(SHAPE), token_batches(256)),
    "wide": (Wide, shaped_batches("2048", torch.float32)),
    "convolutions": (Convolutions, shaped_batches("3x128x128", torch.float32)),
}
STRICT = {"stage3_max_live_parameters": 0, "stage3_param_persistence_threshold": 1000}


@attrs.frozen
class Case:
    """One configuration."""

    model: str
    micro_batch: int
    dtype: str = "fp32"
    stage: int = 0
    world: int = 1
    accumulation: int = 1
    optimizer: str = "AdamW"
    zero: dict[str, Any] = attrs.field(factory=dict)

    def config(self) -> dict[str, Any]:
        half = {self.dtype: {"enabled": True}} if self.dtype != "fp32" else {}
        return {
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.accumulation,
            "optimizer": {"type": self.optimizer, "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": self.stage, **self.zero},
            "config_version": "zengine-0.2",
            **half,
        }

    def __str__(self) -> str:
        strict = ", nothing kept whole" if self.zero else ""
        return (
            f"{self.model}, {self.dtype}, {self.optimizer}, stage {self.stage} on {self.world}, "
            f"{self.accumulation} x {self.micro_batch}{strict}"
        )


CASES = (
    Case("transformer", 2),
    Case("transformer", 8),
    Case("transformer", 8, "bf16"),
    Case("transformer", 4, "bf16", accumulation=2),
    Case("transformer", 4, accumulation=3),
    Case("transformer", 4, optimizer="Lion"),
    Case("recomputed", 8),
    Case("recomputed", 12, "bf16"),
    Case("wide", 512),
    Case("wide", 2048, "bf16"),
    Case("convolutions", 8),
    Case("convolutions", 16),
    Case("transformer", 4, stage=0, world=2),
    Case("transformer", 4, stage=1, world=2),
    Case("transformer", 4, stage=2, world=2),
    Case("transformer", 4, stage=3, world=2),
    Case("transformer", 4, "bf16", stage=2, world=2, accumulation=2),
    Case("transformer", 4, "bf16", stage=3, world=2, zero=STRICT),
    Case("recomputed", 8, stage=3, world=2, zero=STRICT),
    Case("wide", 512, stage=2, world=2),
)


def run_case(index: int) -> tuple[int, int]:
    """(predicted, measured) on this rank."""
    case = CASES[index]
    torch.set_num_threads(1 if case.world > 1 else 2)
    make, batch = MODELS[case.model]
    plan = resolve(load(case.config()), Facts(world_size=case.world, replicas=case.world))
    with torch.device("meta"):
        module = plan.precision.cast_module(make())
    predicted = peak(Workload(module=module, batch=batch, device="cpu"), plan, case.micro_batch, case.world).total
    del module
    _warm(case.dtype)
    zcomm.barrier()
    gc.collect()

    def start(model: nn.Module) -> Any:
        return zengine.initialize(model=model, config=case.config())[0]

    return predicted, measure(make, batch, start, micro_batch=case.micro_batch, device="cpu").peak


def _warm(dtype: str) -> None:
    """Threads, kernels and the group's own buffers are there before the first look."""
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    x = torch.ones(64, 64, dtype=kind, requires_grad=True)
    (x @ x).sum().backward()
    zcomm.all_reduce(torch.ones(1 << 20))


def main() -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="numbers of configurations, from 1")
    options = parser.parse_args()
    chosen = [int(number) - 1 for number in options.only.split(",") if number] or list(range(len(CASES)))
    lines = []
    for index in chosen:
        end_ranks()
        found = run_ranks(run_case, CASES[index].world, index, timeout_s=600)
        predicted, measured = max(found, key=lambda pair: pair[1])
        error = predicted / measured - 1
        lines.append(
            f"| {index + 1} | {CASES[index]} | {predicted / MIB:,.0f} | {measured / MIB:,.0f} | {error:+.1%} |"
        )
        print(lines[-1], flush=True)
    if not options.only:
        (RESULTS / "planner-cpu.md").write_text(page(lines), encoding="utf-8")
    return 0


def page(lines: list[str]) -> str:
    """The results with where they come from."""
    worst = max((abs(float(line.split("|")[5].strip(" %"))) for line in lines), default=0.0)
    intro = (__doc__ or "").split("\n\n")[2]
    head = ["# The planner against measurement", "", *textwrap.wrap(" ".join(intro.split()), 118), ""]
    where = f"{datetime.date.today()}, {platform.machine()}, 2 cores, torch {torch.__version__}"
    table = ["| | configuration | predicted MiB | measured MiB | error |", "|---|---|---|---|---|", *lines]
    return "\n".join([*head, f"{where}; the largest error is {worst}%.", "", *table, ""])


if __name__ == "__main__":
    sys.exit(main())
