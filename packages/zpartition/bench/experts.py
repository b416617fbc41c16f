"""Milliseconds of forward and backward of an expert layer sharded over ranks, beside its lower bound.

    python packages/zpartition/bench/experts.py [--tokens 2048] [--experts 8] [--k 1] [--rounds 15] [--keep-memory]

Every rank has its own tokens, each routed to k experts of inner size 4 x width / k, so that a token costs as much
arithmetic as in the dense layer.  Ranks are processes with one thread each.  All contenders exist at once and run in
turns; the median over rounds of the slowest rank is reported.

    ours      zpartition.experts.MoE without dropping, its experts sharded over all ranks
    alone     the same layer with all experts on every rank: no message
    dense     one MLP of inner size 4 x width
    exchange  only the layer's four token exchanges, with as many rows: the floor of its all-to-all
    one-hot   only the dispatch of DeepSpeed's layer: masks (tokens, experts, capacity) and einsums

Goal: ours <= 1.2 x dense + exchange.

--keep-memory starts the ranks as `zengine run --keep-memory` does.  Without it glibc returns the memory of the
experts' gradients to the system after each step, and faults it in again page by page: the layer has as many times the
weights of the dense one as experts, and pays that cost as many times.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot
from turns import medians

import zcomm
from zcomm.testing import run_ranks
from zpartition.experts import ExpertMLP, MoE, distribute


def make(width: int, experts: int, k: int) -> MoE:
    torch.manual_seed(0)
    expert = ExpertMLP(width, 4 * width // k, "gelu")
    return MoE(width, expert, experts, k=k, drop_tokens=False, use_rts=False, top2_2nd_expert_sampling=False)


def exchanges(tokens: int, width: int, k: int) -> Callable[[], None]:
    """Exchange as many rows with every rank, both ways, forward and backward."""
    size = zcomm.group_size()
    share = tokens * k // size * width
    table = [[share] * size] * size
    rows = torch.randn(share * size)

    def exchange() -> None:
        for _ in range(4):
            zcomm.all_to_all_v(rows, table)

    return exchange


def one_hot_dispatch(layer: MoE, x: Tensor) -> Tensor:
    """Dispatch and combine by (tokens, experts, capacity), around identity experts."""
    routing = layer.gate(x)
    experts = layer.num_experts
    mask = one_hot(routing.experts, experts).float()  # (tokens, k, experts)
    capacity = int(routing.counts.max())
    place = ((mask.flatten(0, 1).cumsum(0) - 1).view_as(mask) * mask).sum(-1).long()
    slots = one_hot(place, capacity).float()
    combine = torch.einsum("tk,tke,tkc->tec", routing.weights, mask, slots)
    packed = torch.einsum("tec,tm->ecm", combine.bool().float(), x)
    return torch.einsum("tec,ecm->tm", combine, packed)


def measure(tokens: int, width: int, experts: int, k: int, rounds: int) -> dict[str, float]:
    """Median of each contender on this rank, ms; and the imbalance of tokens between ranks."""
    torch.set_num_threads(1)
    shared, alone, dense = make(width, experts, k), make(width, experts, k), ExpertMLP(width, 4 * width, "gelu")
    distribute(nn.Sequential(shared), None)
    torch.manual_seed(zcomm.group_rank())
    x = torch.randn(tokens, width, requires_grad=True)

    def step(forward: Callable[[Tensor], Tensor], module: nn.Module) -> Callable[[], None]:
        def run() -> None:
            forward(x).square().mean().backward()
            module.zero_grad()

        return run

    calls = {
        "ours": step(lambda x: shared(x)[0], shared),
        "alone": step(lambda x: alone(x)[0], alone),
        "dense": step(dense, dense),
        "exchange": exchanges(tokens, width, k),
        "one-hot": step(lambda x: one_hot_dispatch(alone, x), alone),
    }
    found = medians(calls, rounds)
    counts = shared(x)[2]
    zcomm.all_reduce(counts)
    found["uneven"] = float(counts.view(zcomm.group_size(), -1).sum(1).max() / counts.sum()) * zcomm.group_size()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--k", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--keep-memory", action="store_true")
    given = parser.parse_args()
    if given.keep_memory:
        os.environ.update({"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)})  # before ranks start
    numbers = (given.tokens, given.width, given.experts, given.k, given.rounds)
    ranks = run_ranks(measure, given.ranks, *numbers, timeout_s=600)
    slowest = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
    print(
        f"{given.tokens} tokens of {given.width} a rank, {given.experts} experts, k = {given.k}, {given.ranks} "
        f"ranks, fp32; ms.  The busiest rank computes {slowest['uneven']:.2f} of its share"
    )
    for name in ("ours", "alone", "dense", "exchange", "one-hot"):
        print(f"{name:12} {slowest[name]:8.1f}")
    floor = slowest["dense"] + slowest["exchange"]
    print(f"ours / (dense + exchange) {slowest['ours'] / floor:.2f}; goal {1.2 * slowest['dense']:.1f} +", end=" ")
    goal = 1.2 * slowest["dense"] + slowest["exchange"]
    print(f"{slowest['exchange']:.1f} = {goal:.1f} ms: {'reached' if slowest['ours'] <= goal else 'missed'}")


if __name__ == "__main__":
    main()
