"""Batch fetching: dataset and workers, random state, prefetch to the device.

`BatchFetcher` wraps torch's DataLoader, which receives the samples of each batch from us.

Random state.  A DataLoader without its own generator draws a seed from torch's global RNG per pass, so the number of
passes would change the run; ours has a generator.  In worker processes a dataset's random draws (augmentation,
masking) would depend on the worker's previous batches, which no checkpoint can restore.  So each batch reseeds its
worker: the batch is the same for any number of workers and after any interruption.  Without workers the dataset draws
from the main process's generators, which a checkpoint saves.  Ranks that share one replica need identical samples,
but their generators diverge, because each rank draws its own dropout; there every batch reseeds, and
`iterate_seeded` restores the process's generators after each batch.

Prefetch.  A side stream copies a batch out of page-locked memory, and the compute stream waits for that copy alone.
With workers, `num_ahead` batches are on the device before they are requested.  Without workers no batch is fetched
ahead: the dataset would advance the process's generators for batches that the loop has not consumed yet, and a
checkpoint would save them too late.  The copy still overlaps with queued computation.  On a CPU prefetch is the
identity.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, final

import attrs
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from zengine.data.order.order import BatchIndices
from zengine.data.tree import iter_tensors, map_tensors

Collate = Callable[[list[Any]], Any]
Prefetch = Callable[[Iterator[Any]], Iterator[Any]]


def no_prefetch(batches: Iterator[Any]) -> Iterator[Any]:
    """Return `batches` unchanged."""
    return batches


@attrs.frozen(kw_only=True)
class BatchFetcher:
    """Settings that turn samples into batches."""

    collate_fn: Collate = default_collate  # joins a list of samples to a batch
    num_workers: int = 0  # processes that fetch ahead; 0: this process fetches
    pin_memory: bool = False  # page-locked batches, for copies that overlap with computation
    prefetcher: Prefetch = no_prefetch  # applied to the batches; see `make_prefetcher`
    shared_seed: tuple[int, ...] = ()  # (replica,) if several ranks need its samples; (): this rank's own draws

    def fetch_batches(self, dataset: Any, batches: Iterable[BatchIndices], seed: int) -> Iterator[Any]:
        """Return the batches of `batches`, in order.  `dataset` has `__getitem__` and optionally `__getitems__`."""
        view = _BatchDataset(dataset, seed, bool(self.shared_seed))
        return self._open(view, seed, batch_size=None, sampler=batches, collate_fn=self.collate_fn)

    def fetch_stream(
        self, dataset: IterableDataset[Any], batch_size: int, *, drop_last: bool, seed: int
    ) -> Iterator[Any]:
        """Return batches of an IterableDataset, in its own order."""
        options = {"batch_size": batch_size, "drop_last": drop_last, "collate_fn": self.collate_fn}
        return self._open(dataset, seed, **options)

    def _open(self, dataset: Dataset[Any], seed: int, **options: Any) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(seed)
        pin_memory = self.pin_memory and torch.cuda.is_available()
        loader = DataLoader(
            dataset, num_workers=self.num_workers, pin_memory=pin_memory, generator=generator, **options
        )
        batches = iter(loader)
        return self.prefetcher(iterate_seeded(batches, seed, *self.shared_seed) if self.shared_seed else batches)


class _BatchDataset(Dataset[list[Any]]):
    """Dataset of batches: an item is the list of samples of one `BatchIndices`."""

    def __init__(self, dataset: Any, seed: int, is_shared: bool) -> None:
        self._dataset = dataset
        self._seed = seed
        self._is_shared = is_shared

    def __getitem__(self, batch: BatchIndices) -> list[Any]:
        if self._is_shared or get_worker_info() is not None:
            seed_generators(self._seed, batch.epoch, batch.begin)
        indices = list(batch.indices)
        get_many = getattr(self._dataset, "__getitems__", None)  # torch's protocol for batched reads
        return get_many(indices) if get_many is not None else [self._dataset[index] for index in indices]


# Random state


def seed_generators(*words: int) -> None:
    """Seed the global generators of Python, numpy and torch from `words` (>= 0) alone."""
    drawn = np.random.SeedSequence(words).generate_state(4)
    random.seed(int(drawn[0]))
    np.random.seed(drawn[1])
    torch.default_generator.manual_seed(int(drawn[2]) << 32 | int(drawn[3]))


@contextmanager
def preserve_generators() -> Iterator[None]:
    """Restore the global generators after the block."""
    states = _generator_states()
    try:
        yield
    finally:
        _set_generator_states(states)


def iterate_seeded(batches: Iterator[Any], *words: int) -> Iterator[Any]:
    """Yield `batches`, made with generator states of their own, which `words` seed once."""
    with preserve_generators():
        seed_generators(*words)
        own = _generator_states()
    while True:
        with preserve_generators():
            _set_generator_states(own)
            try:
                batch = next(batches)
            except StopIteration:
                return
            own = _generator_states()
        yield batch


def _generator_states() -> tuple[Any, Any, Tensor]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_generator_states(states: tuple[Any, Any, Tensor]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


# Prefetch


def make_prefetcher(device: torch.device, *, num_ahead: int, num_workers: int) -> Prefetch:
    """Return the prefetcher for `device`: the identity on a CPU or if `num_ahead` is 0."""
    if device.type == "cpu" or num_ahead == 0:
        return no_prefetch
    return DevicePrefetcher(device=device, num_ahead=num_ahead if num_workers else 0)


@final
@attrs.frozen(kw_only=True)
class DevicePrefetcher:
    """Copies batches to `device`, `num_ahead` of them before they are requested."""

    device: torch.device
    num_ahead: int  # batches on the device that the loop has not received yet

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        has_streams = self.device.type == "cuda"
        copier = _StreamCopy(torch.cuda.Stream(self.device)) if has_streams else _DirectCopy()  # type: ignore[no-untyped-call]
        in_flight: deque[Any] = deque()
        for batch in batches:
            in_flight.append(copier.start(batch, self.device))
            if len(in_flight) > self.num_ahead:
                yield copier.finish(in_flight.popleft())
        while in_flight:
            yield copier.finish(in_flight.popleft())


class _DirectCopy:
    """Synchronous copies, for devices without streams."""

    def start(self, batch: Any, device: torch.device) -> Any:
        return map_tensors(batch, lambda tensor: tensor.to(device))

    def finish(self, started: Any) -> Any:
        return started


@attrs.frozen
class _StreamCopy(_DirectCopy):
    """Copies on a CUDA stream."""

    stream: torch.cuda.Stream

    def start(self, batch: Any, device: torch.device) -> tuple[Any, torch.cuda.Event]:
        def copy(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=tensor.is_pinned())

        with torch.cuda.stream(self.stream):
            moved = map_tensors(batch, copy)
            return moved, self.stream.record_event()

    def finish(self, started: tuple[Any, torch.cuda.Event]) -> Any:
        """Return the batch; the current stream waits for the copy and keeps the batch's memory."""
        batch, copied = started
        current = torch.cuda.current_stream(self.stream.device)
        current.wait_event(copied)
        for tensor in iter_tensors(batch):
            tensor.record_stream(current)
        return batch
