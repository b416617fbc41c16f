"""Loader of batches by tokens."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import attrs

from zengine.data.files.arrays import digest
from zengine.data.loaders.base import Loader, check_below, whole_numbers
from zengine.data.loaders.fetch import Fetching
from zengine.data.order.order import Ticket
from zengine.data.order.packing import PackedOrder, Picking

log = logging.getLogger("zengine.data")


@final
class PackedLoader(Loader):
    """Loads an indexed dataset in micro-batches of about equally many tokens.

    `samples_handed` counts the samples handed to all ranks since this loader was made; learning-rate scaling reads it
    at a boundary.
    """

    samples_handed: int
    last_samples: int  # of all ranks in the micro-step handed last

    def __init__(
        self, dataset: Any, order: PackedOrder, *, rank: int, micro_batch_size: int, fetching: Fetching
    ) -> None:
        super().__init__(dataset, micro_batch_size, fetching)
        self.samples_handed = self.last_samples = 0
        self._order = order
        self._rank = rank
        self._micro_step = 0  # of this epoch
        self._ahead: deque[int] = deque()  # samples of all ranks in each micro-step that was fetched and not handed
        self._planned: tuple[int, list[tuple[int, ...]]] = (0, order.micro_batches(0))  # an epoch, its micro-batches
        if order.num_too_long and rank == 0:
            log.warning(
                "dynamic batching: %d of %d samples are longer than max_tokens = %d and are left out",
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
        self._ahead.clear()
        return self._fetching.of_tickets(self.dataset, self._tickets(), self._order.seed)

    def _tickets(self) -> Iterator[Ticket]:
        batches, replicas = self._micro_batches(self.epoch), self._order.replicas
        for begin in range(self._micro_step * replicas, len(batches), replicas):
            self._ahead.append(sum(map(len, batches[begin : begin + replicas])))
            mine = begin + self._rank
            yield Ticket(epoch=self.epoch, begin=mine, indices=batches[mine])

    def _handed(self) -> None:
        self.last_samples = self._ahead.popleft()
        self.samples_handed += self.last_samples
        self.consumed_samples += self.last_samples
        self._micro_step += 1
        if self._micro_step == len(self):
            self.epoch, self.consumed_samples, self._micro_step = self.epoch + 1, 0, 0

    def _ended(self) -> None: ...

    def _prepare(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Keep the saved seed.  With other ranks the same micro-batches follow if a step has as many of them."""
        names = ("seed", "epoch", "consumed_samples", "micro_batches", "per_step", "num_samples")
        seed, epoch, consumed, micro_batches, per_step, num_samples = whole_numbers(state, *names)
        if num_samples != self._order.num_samples:
            raise ValueError(
                f"loader state: num_samples: the position was saved in a dataset of {num_samples} samples, this one "
                f"has {self._order.num_samples}, so the same place would be another sample. Use the same dataset"
            )
        moved = per_step != self._order.per_step
        if (moved and self._order.packing.picking is Picking.SEQLEN) or micro_batches % self._order.replicas:
            raise ValueError(
                f"loader state: it was saved after {micro_batches} micro-batches of an epoch with {per_step} a "
                f"step, and this run has {self._order.per_step} a step on {self._order.replicas} ranks, which makes "
                "another order. Keep train_batch_size and the micro-batch, or do not load the loader's state"
            )
        order = attrs.evolve(self._order, seed=seed)
        planned = order.micro_batches(epoch)
        most = num_samples + per_step  # each has a sample, but for those that fill the last step
        check_below("micro_batches", micro_batches, most + 1, "that an epoch can have")
        check_below("consumed_samples", consumed, most * order.packing.max_tokens + 1, "that an epoch can have")

        def move() -> None:
            self._order, self._planned = order, (epoch, planned)
            self.epoch, self.consumed_samples = epoch, consumed
            self._micro_step = micro_batches // order.replicas
            if self._micro_step >= len(self):
                self.epoch, self.consumed_samples, self._micro_step = epoch + 1, 0, 0

        return move
