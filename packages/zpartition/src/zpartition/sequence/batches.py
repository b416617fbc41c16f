"""Batches: each rank's tokens of whole sequences.

Two things happen before sequences are split, because the next token may be on another rank:

- labels are shifted by one: `labels` become `shift_labels`, the next token of each token;
- tokens get positions, unless the batch has some (packed documents restart at 0).

Then every tensor with a token dim is split; values without one (a number per sample, strings) go to all ranks.

`SequenceBatches` is for loaders that yield the same batches on all sequence ranks, as zengine's do: nothing is sent.

`ExchangedBatches` is for loaders that yield different batches on each sequence rank, as a sampler over all ranks
makes them.  Each of `size` batches, one from each rank, is split over all ranks, in as many rounds: `size` steps do
what one step of `size` data ranks does.  Pieces go only to the ranks that need them.  Shapes,
keys and dtypes may differ between ranks and are exchanged first, as are errors, so that all ranks raise them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, final

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

import zcomm
from zpartition.layout.model_parallel import ModelParallelGroup
from zpartition.sequence.splits import Order, Split

__all__ = ["Batch", "ExchangedBatches", "SequenceBatches", "local_batch", "prepare_batch", "shift_labels"]

Batch = dict[str, Any]

_MAIN = ("input_ids", "inputs_embeds")

IGNORED = -100  # label of a token that is ignored, torch's default in cross_entropy


@final
@attrs.define(eq=False)
class SequenceBatches:
    """Wraps a loader (any iterable) that yields the same dicts on all sequence ranks."""

    loader: Iterable[Mapping[str, Any]]
    split: Split
    pad_id: int | None = None

    @classmethod
    def over(
        cls,
        loader: Iterable[Mapping[str, Any]],
        group: Any = None,
        *,
        order: Order = Order.CONTIGUOUS,
        pad_id: int | None = None,
    ) -> SequenceBatches:
        """Wrap for the ranks of `group`, in its order.  pad_id: see `prepare_batch`; default: lengths must divide."""
        return cls(loader, Split(zcomm.group_size(group), zcomm.group_rank(group), order), pad_id)

    def __iter__(self) -> Iterator[Batch]:
        """Yield this rank's tokens of each batch.  Raises ValueError with the numbers if they do not divide."""
        for batch in self.loader:
            yield self.piece(batch)

    def piece(self, batch: Mapping[str, Any]) -> Batch:
        """Return this rank's tokens of one batch."""
        return local_batch(prepare_batch(batch, self.split.multiple, self.pad_id), self.split)

    def __len__(self) -> int:
        """Number of batches, if the loader knows it."""
        return len(self.loader)  # type: ignore[arg-type]


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
        everyone = zcomm.all_gather_object([fault, _describe(rows)], self.mp_group.group)
        if faults := [f"rank {rank}: {text}" for rank, (text, _) in enumerate(everyone) if text]:
            raise ValueError("; ".join(faults))
        if not all(description for _, description in everyone):
            return []
        return _exchange(rows, [description for _, description in everyone], self.mp_group)


def shift_labels(labels: Tensor, ignore_index: int = IGNORED) -> Tensor:
    """(..., tokens): shift labels to the left by one; the last token has none."""
    return pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()


def prepare_batch(batch: Mapping[str, Any], multiple: int = 1, pad_id: int | None = None) -> Batch:
    """Prepare a batch of whole sequences to be split.

    batch: `input_ids` or `inputs_embeds` (batch, tokens, ...), and other values; `labels` are removed, and missing
        `shift_labels` and `position_ids` added.
    pad_id: token that pads the length at the end to a multiple of `multiple`, without effect on the loss; None: no
        padding.
    """
    made, length = dict(batch), sequence_length(batch)
    tokens = next(made[key] for key in _MAIN if key in made)
    if "labels" in made:
        labels = made.pop("labels")
        made.setdefault("shift_labels", None if labels is None else shift_labels(labels))
    if made.get("position_ids") is None:
        made["position_ids"] = torch.arange(length, device=tokens.device).expand(tokens.shape[0], length)
    more = -length % multiple
    if pad_id is None or not more:
        return made
    return {key: _pad(key, value, length, more, pad_id) for key, value in made.items()}


def sequence_length(batch: Mapping[str, Any]) -> int:
    """Return the number of tokens of a sequence.  Raises ValueError if the batch has no tokens."""
    main = next((batch[key] for key in _MAIN if isinstance(batch.get(key), Tensor)), None)
    if main is None or main.dim() < 2:
        raise ValueError(
            f"a batch with the keys {', '.join(map(str, batch)) or '(none)'}: sequences are split by the tokens of "
            f"{' or '.join(_MAIN)}, a tensor (batch, tokens, ...). Return a dict with one from the collate function."
        )
    return int(main.shape[1])


def local_batch(batch: Batch, split: Split) -> Batch:
    """Return this rank's tokens.  Raises ValueError if they do not divide."""
    length = sequence_length(batch)
    split.check(length, "a batch")
    return {key: split.take(value) if _has_tokens(key, value, length) else value for key, value in batch.items()}


def _pad(key: str, value: Any, length: int, more: int, pad_id: int) -> Any:
    if not _has_tokens(key, value, length):
        return value
    if key == "position_ids":
        last = value[:, -1:]
        return torch.cat([value, last + 1 + torch.arange(more, device=value.device)], 1)
    fill = {"input_ids": pad_id, "shift_labels": IGNORED}.get(key, 0)
    return pad(value, (*(0, 0) * (value.dim() - 2), 0, more), value=fill)


def _has_tokens(key: str, value: Any, length: int) -> bool:
    """Check if the value has a token dim.  Raises ValueError for a value of another length."""
    if not isinstance(value, Tensor) or value.dim() < 2:
        return False
    if value.shape[1] != length:
        raise ValueError(
            f"{key} of shape {list(value.shape)} is not (batch, {length} tokens, ...). A mask over pairs of tokens "
            "cannot be split: leave it out, and mark the start of documents by position_ids."
        )
    return True


def _describe(rows: list[Batch]) -> dict[str, Any]:
    """Describe a piece by key: [shape, dtype], or the value itself if it is no tensor.  JSON."""
    return {
        key: [list(value.shape), str(value.dtype).removeprefix("torch.")]
        if isinstance(value, Tensor)
        else {"value": value}
        for key, value in (rows[0] if rows else {}).items()
    }


def _exchange(rows: list[Batch], descriptions: list[dict[str, Any]], mp_group: ModelParallelGroup) -> list[Batch]:
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
    wire = sent.to(_wire_device(mp_group))
    is_bool = dtype == torch.bool  # not every backend supports it
    arrived = zcomm.all_to_all_v(
        wire.view(torch.uint8) if is_bool else wire, numels, mp_group.group, label=f"batches: {key}"
    )
    parts = torch.split(arrived.view(dtype), [row[0] for row in numels])
    return {rank: parts[rank].view(shape).to(device) for rank, shape in shapes.items()}


def _wire_device(mp_group: ModelParallelGroup) -> torch.device:
    """Return the device of messages: a GPU if the group supports GPUs only."""
    backend = dist.get_backend(mp_group.group) if mp_group.size > 1 else "gloo"
    return torch.device("cuda") if "nccl" in backend and "gloo" not in backend else torch.device("cpu")
