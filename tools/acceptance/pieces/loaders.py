"""Loading batches ahead: pinned batches cross to the device on a stream of their own, in order, with their bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from acceptance.bench import Bench, differing
from acceptance.verdict import Figure
from zengine.data.loaders.fetch import BatchFetcher, make_prefetcher, no_prefetch
from zengine.data.order.order import BatchIndices

__all__ = ["Samples", "run"]

NUM_AHEAD, NUM_WORKERS = 2, 2


class Samples(torch.utils.data.Dataset[Tensor]):
    """Samples whose values say their index."""

    def __init__(self, numel: int) -> None:
        self.numel = numel

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((self.numel,), float(index)).add_(torch.arange(self.numel) / self.numel)


def run(bench: Bench) -> None:
    """Compare batches with the dataset's own, and a loop that loads ahead with one that does not."""
    dataset = Samples(bench.choose(1 << 18, 256))
    num_batches, size = bench.choose((24, 16), (5, 2))
    starts = range(0, size * num_batches, size)
    order = [BatchIndices(epoch=0, begin=at, indices=tuple(range(at, at + size))) for at in starts]
    ahead = make_prefetcher(bench.device, num_ahead=NUM_AHEAD, num_workers=NUM_WORKERS)

    def batches(prefetcher: Callable[[Iterator[Any]], Iterator[Any]] = no_prefetch) -> Iterator[Any]:
        fetcher = BatchFetcher(num_workers=NUM_WORKERS, pin_memory=True, prefetcher=prefetcher)
        return fetcher.fetch_batches(dataset, order, seed=0)

    found = []
    for batch in batches(ahead):
        found.append((batch * 2).cpu())
        del batch
        torch.empty(8, device=bench.device)  # could be given the batch's memory
    expected = [torch.stack([dataset[index] for index in each.indices]) * 2 for each in order]
    bench.check(f"{num_batches} batches arrive in order, with their bits", differing(found, expected))
    hide(bench, list(batches()), ahead)


def hide(bench: Bench, pinned: list[Tensor], ahead: Callable[[Iterator[Any]], Iterator[Any]]) -> None:
    """Compare how long compute takes on batches that are there, copied ahead, and copied one by one."""
    edge = bench.choose(4096, 16)
    square = torch.ones(edge, edge, device=bench.device, dtype=torch.bfloat16)

    def use(batches: Iterable[Tensor]) -> None:
        for batch in batches:
            batch.view(-1)[: edge * edge].sum()
            for _ in range(8):
                square @ square

    there = [batch.to(bench.device) for batch in pinned]
    taken = bench.times(
        {
            "there": lambda: use(there),
            "ahead": lambda: use(ahead(iter(pinned))),
            "in turn": lambda: use(batch.to(bench.device) for batch in pinned),
        },
        rounds=5,
    )
    compute, loaded, in_turn = (min(taken[name]) * 1e3 for name in ("there", "ahead", "in turn"))
    hidden = (in_turn - loaded) / (in_turn - compute) if in_turn > compute else 0.0
    name = "batches copied ahead, beside batches that are there"
    bench.figure(Figure(name=name, unit="ms", measured=loaded, peer=compute))
    bench.figure(Figure(name="share of the copies' time that is hidden", unit="", measured=hidden, at_least=0.8))
