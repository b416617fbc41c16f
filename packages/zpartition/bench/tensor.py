"""Milliseconds of forward and backward of tensor-parallel layers: ours, torch's DTensor, and the floor.

    python packages/zpartition/bench/tensor.py [--layers 6] [--width 256] [--tokens 64] [--rounds 15] [--ranks 2]

A stack of blocks, each an attention (q, k, v by columns, output by rows) and an MLP (up by columns, down by rows)
with residuals: two all-reduces forward and two backward per block, 24 in six blocks.  Ranks are processes with one
thread each.  All contenders exist at once and run in turns; the median over rounds of the slowest rank is reported.

    whole     the model on one rank, which does all of the work
    ours      zpartition.tensor.parallelize
    dtensor   torch.distributed.tensor.parallel.parallelize_module, the same plan
    parts     the same layers without any message: a rank's computation (the results are meaningless)
    floor     parts, and the all-reduces of zcomm alone, as many and as large, in a row
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import gelu, scaled_dot_product_attention
from turns import medians

import zcomm
from zcomm.testing import run_ranks
from zpartition.layout.model_parallel import ALONE
from zpartition.tensor import Column, Row, Rule, TensorPlan, parallelize, resolve
from zpartition.tensor.parallel_region import ParallelRegion
from zpartition.tensor.parallelize import apply_splits

COLUMNS, ROWS = ("q", "k", "v", "up"), ("out", "down")
PLAN = TensorPlan([Rule(f"*.{name}", Column()) for name in COLUMNS] + [Rule(f"*.{name}", Row()) for name in ROWS])


class Block(nn.Module):
    """(tokens, width) -> the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_heads = 8
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.num_heads, -1)).transpose(-3, -2) for layer in (self.q, self.k, self.v)
        )
        y = scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(-3, -2).flatten(-2))
        return x + self.down(gelu(self.up(x)))


def make(layers: int, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(layers)))


def ours(model: nn.Sequential) -> nn.Sequential:
    parallelize(model, PLAN)
    return model


def dtensor(model: nn.Sequential) -> nn.Sequential:
    mesh = init_device_mesh("cpu", (zcomm.group_size(),))
    for block in model:
        parallelize_module(block, mesh, {name: ColwiseParallel() for name in COLUMNS})
        parallelize_module(block, mesh, {name: RowwiseParallel() for name in ROWS})
        block.num_heads //= zcomm.group_size()
    return model


def parts(model: nn.Sequential) -> nn.Sequential:
    apply_splits(model, resolve(PLAN, model, zcomm.group_size(), zcomm.group_rank()), ParallelRegion(ALONE))
    return model


def measure(layers: int, width: int, tokens: int, rounds: int) -> dict[str, float]:
    """Median of each contender on this rank, ms; and the difference of the losses."""
    torch.set_num_threads(1)
    models = {make_it.__name__: make_it(make(layers, width)) for make_it in (ours, dtensor, parts)}
    models["whole"] = make(layers, width)
    x = torch.randn(1, tokens, width, requires_grad=True)
    zcomm.broadcast(x.detach(), source=0)
    losses: dict[str, float] = {}

    def step(name: str) -> None:
        loss = models[name](x).square().mean()
        loss.backward()
        losses[name] = loss.item()
        models[name].zero_grad()

    message = torch.zeros(tokens, width)

    def messages() -> None:
        for _ in range(4 * layers):
            zcomm.all_reduce(message)

    calls = {name: (lambda name=name: step(name)) for name in models} | {"all-reduces": messages}
    found = medians(calls, rounds)
    found["difference"] = max(abs(losses[name] - losses["whole"]) for name in ("ours", "dtensor"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    ranks = run_ranks(measure, given.ranks, given.layers, given.width, given.tokens, given.rounds, timeout_s=600)
    slowest = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
    print(f"{given.layers} blocks of width {given.width}, {given.tokens} tokens, {given.ranks} ranks, fp32; ms")
    for name in ("whole", "ours", "dtensor", "parts", "all-reduces"):
        print(f"{name:12} {slowest[name]:8.1f}")
    print(f"{'floor':12} {slowest['parts'] + slowest['all-reduces']:8.1f}")
    print(f"ours / dtensor {slowest['ours'] / slowest['dtensor']:.2f}, losses differ by {slowest['difference']:.1e}")


if __name__ == "__main__":
    main()
