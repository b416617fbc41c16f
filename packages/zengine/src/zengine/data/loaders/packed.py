"""Loader of batches by tokens (dynamic batching)."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import attrs

from zengine.data.loaders.base import Loader, check_below, read_counts
from zengine.data.loaders.fetch import BatchFetcher
from zengine.data.metrics import digest
from zengine.data.order.order import BatchIndices
from zengine.data.order.packing import PackedOrder, PickingOrder

log = logging.getLogger("zengine.data")


@final
class PackedLoader(Loader):
    """Loads an indexed dataset in micro-batches of about equally many tokens.

    Learning-rate scaling reads `samples_handed` at an accumulation boundary.
    """

    samples_handed: int  # samples that all ranks have received since this loader was made
    last_samples: int  # samples of all ranks in the last micro-step

    def __init__(
        self, dataset: Any, order: PackedOrder, *, rank: int, micro_batch_size: int, fetcher: BatchFetcher
    ) -> None:
        super().__init__(dataset, micro_batch_size, fetcher)
        self.samples_handed = self.last_samples = 0
        self._order = order
        self._rank = rank
        self._micro_step = 0  # of this epoch
        self._fetched: deque[int] = deque()  # samples of each micro-step that was fetched, not yet received
        self._planned: tuple[int, list[tuple[int, ...]]] = (0, order.micro_batches(0))  # (epoch, its micro-batches)
        if order.num_too_long and rank == 0:
            log.warning(
                "dynamic batching: %d of %d samples exceed max_tokens = %d and are dropped",
                order.num_too_long,
                order.num_samples,
                order.packing.max_tokens,
            )

    def fingerprint(self) -> list[str]:
        return [f"{self._order.num_samples} samples", f"lengths {digest(self._order.lengths)}"]

    def __len__(self) -> int:
        """Return the micro-batches of this rank in the current epoch."""
        return len(self._micro_batches(self.epoch)) // self._order.replicas

    def _micro_batches(self, epoch: int) -> list[tuple[int, ...]]:
        if self._planned[0] != epoch:
            self._planned = epoch, self._order.micro_batches(epoch)
        return self._planned[1]

    def epochs_done(self) -> float:
        return self.epoch + self._micro_step / len(self)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, equal on every rank."""
        return {
            "seed": self._order.seed,
            "epoch": self.epoch,
            "consumed_samples": self.consumed_samples,
            "micro_batches": self._micro_step * self._order.replicas,
            "per_step": self._order.per_step,
            "num_samples": self._order.num_samples,
        }

    def _open(self) -> Iterator[Any]:
        self._fetched.clear()
        return self._fetcher.fetch_batches(self.dataset, self._batch_indices(), self._order.seed)

    def _batch_indices(self) -> Iterator[BatchIndices]:
        batches, replicas = self._micro_batches(self.epoch), self._order.replicas
        for begin in range(self._micro_step * replicas, len(batches), replicas):
            self._fetched.append(sum(map(len, batches[begin : begin + replicas])))
            mine = begin + self._rank
            yield BatchIndices(epoch=self.epoch, begin=mine, indices=batches[mine])

    def _advance(self) -> None:
        self.last_samples = self._fetched.popleft()
        self.samples_handed += self.last_samples
        self.consumed_samples += self.last_samples
        self._micro_step += 1
        if self._micro_step == len(self):
            self.epoch, self.consumed_samples, self._micro_step = self.epoch + 1, 0, 0

    def _finish_epoch(self) -> None: ...

    def _prepare(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Prepare the saved position and seed.

        With another world size the same micro-batches follow if a step has equally many of them.
        """
        names = ("seed", "epoch", "consumed_samples", "micro_batches", "per_step", "num_samples")
        seed, epoch, consumed, micro_batches, per_step, num_samples = read_counts(state, *names)
        if num_samples != self._order.num_samples:
            raise ValueError(
                f"loader state: num_samples: the position was saved in a dataset of {num_samples} samples, this one "
                f"has {self._order.num_samples}, so the position would mean another sample. Use the same dataset"
            )
        moved = per_step != self._order.per_step
        if (moved and self._order.packing.picking is PickingOrder.SEQLEN) or micro_batches % self._order.replicas:
            raise ValueError(
                f"loader state: it was saved after {micro_batches} micro-batches of an epoch with {per_step} per "
                f"step, but this run has {self._order.per_step} per step on {self._order.replicas} ranks, which "
                "is another order. Keep train_batch_size and the micro-batch size, or skip the loader's state"
            )
        order = attrs.evolve(self._order, seed=seed)
        planned = order.micro_batches(epoch)
        most = num_samples + per_step  # each has a sample, except padding of the last step
        check_below("micro_batches", micro_batches, most + 1, "possible in an epoch")
        check_below("consumed_samples", consumed, most * order.packing.max_tokens + 1, "possible in an epoch")

        def move() -> None:
            self._order, self._planned = order, (epoch, planned)
            self.epoch, self.consumed_samples = epoch, consumed
            self._micro_step = micro_batches // order.replicas
            if self._micro_step >= len(self):
                self.epoch, self.consumed_samples, self._micro_step = epoch + 1, 0, 0

        return move
