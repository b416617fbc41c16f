"""Milliseconds of a forward and backward through a layer of experts that ranks share out, and what it must cost.

    python packages/zpartition/bench/experts.py [--tokens 2048] [--experts 8] [--k 1] [--rounds 15] [--keep-memory]

Every rank has its own tokens, of which each goes to k experts of an inner size of 4 x width / k, so that a token
costs as much arithmetic as in the dense layer.  Ranks are processes with one thread each.  All contenders live at
once and take turns, round by round; the median counts, of the slowest rank.

    ours      zpartition.experts.MoE, nothing dropped, its experts shared out over all ranks
    alone     the same layer with all experts on every rank: no message
    dense     one MLP of inner size 4 x width
    exchange  the layer's four exchanges of tokens alone, as many rows as it sends: the floor of its all-to-all
    one-hot   the dispatch of DeepSpeed's layer in place of ours, alone: masks (tokens, experts, capacity) and einsums

The goal: ours <= 1.2 x dense + exchange.

--keep-memory starts the ranks as `zengine run --keep-memory` does.  Without it glibc hands the gradients of the
experts back to the system after each step, which gives them out again page by page: the layer has as many times the
weights of the dense one as experts, and pays that as many times.
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
    """As many rows to every rank, there and back, forward and backward."""
    size = zcomm.group_size()
    share = tokens * k // size * width
    table = [[share] * size] * size
    rows = torch.randn(share * size)

    def exchange() -> None:
        for _ in range(4):
            zcomm.exchange_slices(rows, table)

    return exchange


def one_hot_dispatch(layer: MoE, x: Tensor) -> Tensor:
    """(tokens, experts, capacity) in and out, around experts that do nothing."""
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
    """The median of each contender on this rank, ms; and how uneven the tokens of the ranks are."""
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
