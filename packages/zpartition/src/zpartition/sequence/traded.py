"""Batches of whole sequences where each sequence rank's loader yields others, as a sampler over all ranks makes them.

Of `size` batches, one of each rank, everybody gets a piece, in as many rounds: after `size` steps the ranks have done
what as many data ranks do in one.  Pieces travel to where they are wanted and nowhere else; shapes, keys and dtypes
may differ from rank to rank and are told first, as are faults, so that all ranks raise them.
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
from zpartition.cells import Cell
from zpartition.sequence.batches import Batch, piece_of, prepared
from zpartition.sequence.splits import Order, Split

__all__ = ["TradedBatches"]


@final
@attrs.define(eq=False)
class TradedBatches:
    """Around a loader that yields other dicts on each sequence rank; yields `size` pieces for each of them.

    The last round ends for all when the first rank has no more.
    """

    loader: Iterable[Mapping[str, Any]]
    cell: Cell
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
    ) -> TradedBatches:
        """For the ranks of `group`, in its order; see `SequenceBatches.over`."""
        return cls(loader, Cell.of(group), order, pad_id)

    def __iter__(self) -> Iterator[Batch]:
        """Pieces of the batches of rank 0, 1, ...: equal ranks of all see the same samples at the same time.

        Collective of the sequence ranks.  Raises ValueError on all of them if a rank's batch cannot be shared out.
        """
        batches = iter(self.loader)
        while True:
            batch = next(batches, None)
            rounds = self._traded(batch)
            if not rounds:
                return
            yield from rounds

    def __len__(self) -> int:
        """Pieces, if the loader tells how many batches it has."""
        return len(self.loader) * self.cell.size  # type: ignore[arg-type]

    def _traded(self, batch: Mapping[str, Any] | None) -> list[Batch]:
        """This rank's piece of everybody's batch; nothing when somebody has none."""
        splits = [Split(self.cell.size, rank, self.order) for rank in range(self.cell.size)]
        mine, fault = {}, ""
        try:
            mine = {} if batch is None else prepared(batch, splits[0].multiple, self.pad_id)
            rows = [piece_of(mine, split) for split in splits] if mine else []
        except ValueError as error:
            rows, fault = [], str(error)
        told = zcomm.exchange([fault, _described(rows)], self.cell.group)
        if faults := [f"rank {rank}: {text}" for rank, (text, _) in enumerate(told) if text]:
            raise ValueError("; ".join(faults))
        if not all(description for _, description in told):
            return []
        return _received(rows, [description for _, description in told], self.cell)


def _described(rows: list[Batch]) -> dict[str, Any]:
    """For each key what a piece of it is: [shape, dtype], or the value itself where it is no tensor.  JSON."""
    return {
        key: [list(value.shape), str(value.dtype).removeprefix("torch.")]
        if isinstance(value, Tensor)
        else {"value": value}
        for key, value in (rows[0] if rows else {}).items()
    }


def _received(rows: list[Batch], told: list[dict[str, Any]], cell: Cell) -> list[Batch]:
    """One message for each key; keys and shapes may differ from batch to batch."""
    found: list[Batch] = [{} for _ in told]
    for key in sorted({key for each in told for key in each}):
        owners = [rank for rank, each in enumerate(told) if key in each]
        tensors = [rank for rank in owners if isinstance(told[rank][key], list)]
        for rank in set(owners) - set(tensors):
            found[rank][key] = told[rank][key]["value"]
        for dtype in sorted({told[rank][key][1] for rank in tensors}):
            senders = [rank for rank in tensors if told[rank][key][1] == dtype]
            shapes = {rank: torch.Size(told[rank][key][0]) for rank in senders}
            for rank, value in _exchanged(key, rows, shapes, getattr(torch, dtype), cell).items():
                found[rank][key] = value
    return found


def _exchanged(
    key: str, rows: list[Batch], shapes: dict[int, torch.Size], dtype: torch.dtype, cell: Cell
) -> dict[int, Tensor]:
    """From every rank in `shapes` its piece for this one."""
    numels = [[shapes[rank].numel() if rank in shapes else 0] * cell.size for rank in range(cell.size)]
    sent = torch.empty(0, dtype=dtype)
    home = sent.device
    if cell.rank in shapes:
        home = rows[0][key].device
        sent = torch.cat([row[key].reshape(-1) for row in rows])
    wire = sent.to(_carrier(cell))
    is_bool = dtype == torch.bool  # which not every transport carries
    arrived = zcomm.exchange_slices(
        wire.view(torch.uint8) if is_bool else wire, numels, cell.group, label=f"batches: {key}"
    )
    parts = torch.split(arrived.view(dtype), [row[0] for row in numels])
    return {rank: parts[rank].view(shape).to(home) for rank, shape in shapes.items()}


def _carrier(cell: Cell) -> torch.device:
    """Where tensors travel: a GPU where the group is of GPUs only."""
    backend = dist.get_backend(cell.group) if cell.size > 1 else "gloo"
    return torch.device("cuda") if "nccl" in backend and "gloo" not in backend else torch.device("cpu")
