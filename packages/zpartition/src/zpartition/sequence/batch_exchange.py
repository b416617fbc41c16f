"""Batch exchange: for loaders that yield different batches on each sequence rank, as a sampler over all ranks makes
    them.

Each of `size` batches, one from each rank, is split over all ranks, in as many rounds: after `size` steps the ranks
have done what as many data ranks do in one.  Pieces go only to the ranks that need them.  Shapes, keys and dtypes may
differ between ranks and are exchanged first, as are errors, so that all ranks raise them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, final

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

import zcomm
from zpartition.layout.model_parallel import ModelParallelGroup
from zpartition.sequence.batches import Batch, local_batch, prepare_batch
from zpartition.sequence.splits import Order, Split

__all__ = ["ExchangedBatches"]


@final
@attrs.define(eq=False)
class ExchangedBatches:
    """Wraps a loader that yields different dicts on each sequence rank; yields `size` pieces for each of them.

    Iteration ends on all ranks when the first one has no more batches.
    """

    loader: Iterable[Mapping[str, Any]]
    mp_group: ModelParallelGroup
    order: Order = Order.CONTIGUOUS
    pad_id: int | None = None

    @classmethod
    def over(
        cls,
        loader: Iterable[Mapping[str, Any]],
        group: ProcessGroup | None = None,
        *,
        order: Order = Order.CONTIGUOUS,
        pad_id: int | None = None,
    ) -> ExchangedBatches:
        """Wrap for the ranks of `group`, in its order; see `SequenceBatches.over`."""
        return cls(loader, ModelParallelGroup.of(group), order, pad_id)

    def __iter__(self) -> Iterator[Batch]:
        """Yield pieces of the batches of rank 0, 1, ...: all ranks see the same samples at the same time.

        Collective of the sequence ranks.  Raises ValueError on all of them if a rank's batch cannot be split.
        """
        batches = iter(self.loader)
        while True:
            batch = next(batches, None)
            rounds = self._exchange_round(batch)
            if not rounds:
                return
            yield from rounds

    def __len__(self) -> int:
        """Number of pieces, if the loader knows its number of batches."""
        return len(self.loader) * self.mp_group.size  # type: ignore[arg-type]

    def _exchange_round(self, batch: Mapping[str, Any] | None) -> list[Batch]:
        """Return this rank's piece of each rank's batch; nothing if a rank has none."""
        splits = [Split(self.mp_group.size, rank, self.order) for rank in range(self.mp_group.size)]
        mine, fault = {}, ""
        try:
            mine = {} if batch is None else prepare_batch(batch, splits[0].multiple, self.pad_id)
            rows = [local_batch(mine, split) for split in splits] if mine else []
        except ValueError as error:
            rows, fault = [], str(error)
        everyone = zcomm.all_gather_object([fault, _described(rows)], self.mp_group.group)
        if faults := [f"rank {rank}: {text}" for rank, (text, _) in enumerate(everyone) if text]:
            raise ValueError("; ".join(faults))
        if not all(description for _, description in everyone):
            return []
        return _received(rows, [description for _, description in everyone], self.mp_group)


def _described(rows: list[Batch]) -> dict[str, Any]:
    """Describe a piece by key: [shape, dtype], or the value itself if it is no tensor.  JSON."""
    return {
        key: [list(value.shape), str(value.dtype).removeprefix("torch.")]
        if isinstance(value, Tensor)
        else {"value": value}
        for key, value in (rows[0] if rows else {}).items()
    }


def _received(rows: list[Batch], descriptions: list[dict[str, Any]], mp_group: ModelParallelGroup) -> list[Batch]:
    """Exchange one message for each key; keys and shapes may differ between batches."""
    found: list[Batch] = [{} for _ in descriptions]
    for key in sorted({key for each in descriptions for key in each}):
        owners = [rank for rank, each in enumerate(descriptions) if key in each]
        tensors = [rank for rank in owners if isinstance(descriptions[rank][key], list)]
        for rank in set(owners) - set(tensors):
            found[rank][key] = descriptions[rank][key]["value"]
        for dtype in sorted({descriptions[rank][key][1] for rank in tensors}):
            senders = [rank for rank in tensors if descriptions[rank][key][1] == dtype]
            shapes = {rank: torch.Size(descriptions[rank][key][0]) for rank in senders}
            for rank, value in _exchange_key(key, rows, shapes, getattr(torch, dtype), mp_group).items():
                found[rank][key] = value
    return found


def _exchange_key(
    key: str, rows: list[Batch], shapes: dict[int, torch.Size], dtype: torch.dtype, mp_group: ModelParallelGroup
) -> dict[int, Tensor]:
    """Return this rank's piece from every rank in `shapes`."""
    numels = [[shapes[rank].numel() if rank in shapes else 0] * mp_group.size for rank in range(mp_group.size)]
    sent = torch.empty(0, dtype=dtype)
    device = sent.device
    if mp_group.rank in shapes:
        device = rows[0][key].device
        sent = torch.cat([row[key].reshape(-1) for row in rows])
    wire = sent.to(_carrier(mp_group))
    is_bool = dtype == torch.bool  # not every backend supports it
    arrived = zcomm.all_to_all_v(
        wire.view(torch.uint8) if is_bool else wire, numels, mp_group.group, label=f"batches: {key}"
    )
    parts = torch.split(arrived.view(dtype), [row[0] for row in numels])
    return {rank: parts[rank].view(shape).to(device) for rank, shape in shapes.items()}


def _carrier(mp_group: ModelParallelGroup) -> torch.device:
    """Return the device of messages: a GPU if the group supports GPUs only."""
    backend = dist.get_backend(mp_group.group) if mp_group.size > 1 else "gloo"
    return torch.device("cuda") if "nccl" in backend and "gloo" not in backend else torch.device("cpu")
