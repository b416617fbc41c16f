"""A training step over one long sequence: on one rank, and split over several by Ulysses or a ring.

    python packages/zpartition/bench/sequence.py [--tokens 8192] [--layers 2] [--width 256] [--heads 8] [--rounds 5]
        [--ranks 2] [--write FOLDER]

A stack of blocks, each causal attention and an MLP, with a head over a vocabulary and a chunked loss.  Ranks are
processes with one thread each; all contenders exist at once and run in turns.  Reported are, of the slowest rank, the
fastest round (other work on the machine only adds) and the median of processor time (to which it adds little).

    whole      one rank has the sequence; the others do the same at the same time, so that all cores are as busy
    alone      one rank has the sequence, and the others wait (a core, caches and memory for itself)
    ulysses    each rank has its tokens; heads and tokens are exchanged around attentions
    ring       each rank has an early and a late run of its tokens; keys go round
    messages   only the messages of Ulysses: all-to-alls, as many and as large, in a row

`kept` is the memory that autograd keeps from forward to backward on a rank, without weights: the activations at their
peak.  Times include the reduction of weight gradients over ranks (for `whole` too, as over data ranks).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention
from turns import take_turns

import zcomm
from zcomm.testing import run_ranks
from zpartition.sequence import (
    DistributedAttention,
    Order,
    Split,
    chunked_cross_entropy,
    mean_over_sequence,
    ring_attention,
)

VOCABULARY = 1024
WARM_UP = 1

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Block(nn.Module):
    """(batch, tokens, width) -> the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        heads = self.qkv(self.norm1(x)).view(*x.shape[:2], 3 * self.heads, -1).transpose(1, 2)
        x = x + self.out(attention(*heads.chunk(3, 1)).transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor, attention: Attention) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, attention)
        return chunked_cross_entropy(x, self.head.weight, labels, reduction="sum")


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ring_attention(q, k, v, is_causal=True)


class Contest:
    """All contenders on this rank."""

    def __init__(self, layers: int, width: int, heads: int, tokens: int) -> None:
        torch.set_num_threads(1)
        self.size, self.rank, self.layers = zcomm.group_size(), zcomm.group_rank(), layers
        self.model = Model(layers, width, heads)
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, VOCABULARY, (1, tokens), generator=generator)
        self.labels = self.tokens.roll(-1, 1)
        self.ulysses = DistributedAttention(causal, None, scatter_idx=1, gather_idx=2)
        self.parcel = torch.randn(3 * tokens // self.size * width)
        self.losses: dict[str, float] = {}

    def calls(self) -> dict[str, Callable[[], None]]:
        contiguous, zigzag = (Split(self.size, self.rank, order) for order in Order)
        return {
            "whole": lambda: self.step("whole", Split(), causal),
            "alone": lambda: self.step("alone", Split(), causal) if self.rank == 0 else None,
            "ulysses": lambda: self.step("ulysses", contiguous, self.ulysses),
            "ring": lambda: self.step("ring", zigzag, ring),
            "messages": self.messages,
        }

    def loss(self, split: Split, attention: Attention) -> Tensor:
        labels = split.take(self.labels)
        total = self.model(split.take(self.tokens), labels, attention)
        return total / labels.numel() if split.size == 1 else mean_over_sequence(total, labels.numel())

    def step(self, name: str, split: Split, attention: Attention) -> None:
        loss = self.loss(split, attention)
        loss.backward()
        self.losses[name] = loss.item()
        if name != "alone":
            for param in self.model.parameters():
                zcomm.all_reduce(param.grad)
        self.model.zero_grad()

    def messages(self) -> None:
        for numel in (3, 1, 1, 3) * self.layers:
            parcel = self.parcel[: self.parcel.numel() * numel // 3]
            zcomm.all_to_all(torch.empty_like(parcel), parcel)

    def kept(self, split: Split, attention: Attention) -> int:
        """Bytes that autograd keeps, each storage once."""
        found: dict[int, int] = {}
        weights = {param.untyped_storage().data_ptr() for param in self.model.parameters()}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                found[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = self.loss(split, attention)
        del loss
        return sum(found.values())


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Return (milliseconds of wall time, milliseconds of processor time)."""
    zcomm.barrier()
    start, worked = time.perf_counter(), time.process_time()
    call()
    return (time.perf_counter() - start) * 1e3, (time.process_time() - worked) * 1e3


def measure(layers: int, width: int, heads: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Milliseconds on this rank, bytes kept, and the difference of the losses."""
    contest = Contest(layers, width, heads, tokens)
    calls = contest.calls()
    times = take_turns(calls, rounds, timed, WARM_UP)
    contiguous, zigzag = (Split(contest.size, contest.rank, order) for order in Order)
    kept = {
        "whole": contest.kept(Split(), causal),
        "ulysses": contest.kept(contiguous, contest.ulysses),
        "ring": contest.kept(zigzag, ring),
    }
    losses = contest.losses
    return {
        "ms": {name: min(passed for passed, _ in values) for name, values in times.items()},
        "cpu": {name: statistics.median(worked for _, worked in values) for name, values in times.items()},
        "rounds": {name: [round(passed) for passed, _ in values] for name, values in times.items()},
        "kept": kept,
        "difference": max(abs(losses[name] - losses["whole"]) for name in ("ulysses", "ring")),
    }


def report(given: argparse.Namespace, ranks: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Format the table and its figures, of the slowest rank."""
    ms = {name: max(rank["ms"][name] for rank in ranks) for name in ranks[0]["ms"]}
    cpu = {name: max(rank["cpu"][name] for rank in ranks) for name in ranks[0]["cpu"]}
    kept = {name: max(rank["kept"][name] for rank in ranks) for name in ranks[0]["kept"]}
    sent = 8 * given.layers * given.tokens // given.ranks * given.width * 4 * (given.ranks - 1) // given.ranks
    lines = [
        f"{given.layers} blocks of width {given.width}, {given.heads} heads, {given.tokens} tokens, {given.ranks} "
        f"ranks of one thread, fp32",
        "",
        "|  | ms a step | of alone | processor ms | of alone | kept, MiB | of whole |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in ("whole", "alone", "ulysses", "ring", "messages"):
        ratios = f"{ms[name] / ms['alone']:.2f} | {cpu[name]:.0f} | {cpu[name] / cpu['alone']:.2f}"
        memory = f"{kept[name] / 2**20:.1f} | {kept[name] / kept['whole']:.2f}" if name in kept else " | "
        lines.append(f"| {name} | {ms[name]:.0f} | {ratios} | {memory} |")
    lines += [
        "",
        f"Ulysses sends {sent / 2**20:.1f} MiB a rank and step ({4 * given.layers} all-to-alls). Losses differ by "
        f"{max(rank['difference'] for rank in ranks):.1e}.",
    ]
    load = os.getloadavg()[0]
    lines += [
        "",
        f"{os.cpu_count()} cores; load at the end {load:.1f}: with more than {given.ranks}, others' work is in it.",
    ]
    figures = {
        "ms": ms,
        "kept_bytes": kept,
        "sent_bytes": sent,
        "cpu_ms": cpu,
        "rounds_ms": [rank["rounds"] for rank in ranks],
    }
    return "\n".join(lines), figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--write", type=Path, help="folder for sequence.md and sequence.json")
    given = parser.parse_args()
    sizes = (given.layers, given.width, given.heads, given.tokens, given.rounds)
    table, figures = report(given, run_ranks(measure, given.ranks, *sizes, timeout_s=900))
    print(table)
    if given.write:
        settings = {name: value for name, value in vars(given).items() if name != "write"}
        (given.write / "sequence.md").write_text(f"# Sequence parallelism\n\n{table}\n")
        (given.write / "sequence.json").write_text(json.dumps({**settings, **figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
