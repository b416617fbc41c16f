"""Batches: each rank's tokens of whole sequences.

Two things happen before sequences are split, because the next token may be on another rank:

- labels are shifted by one: `labels` become `shift_labels`, the next token of each token;
- tokens get positions, unless the batch has some (packed documents restart at 0).

Then every tensor with a token dim is split; values without one (a number per sample, strings) go to all ranks.

`SequenceBatches` is for loaders that yield the same batches on all sequence ranks, as zengine's do: nothing is sent.
For loaders that yield different ones see batch_exchange.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, final

import attrs
import torch
from torch import Tensor
from torch.nn.functional import pad

import zcomm
from zpartition.sequence.splits import Order, Split

__all__ = ["Batch", "SequenceBatches", "local_batch", "prepare_batch", "shift_labels"]

Batch = dict[str, Any]

IGNORED = -100  # label of a token that is ignored, torch's default in cross_entropy


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
    return {key: _padded(key, value, length, more, pad_id) for key, value in made.items()}


_MAIN = ("input_ids", "inputs_embeds")


def sequence_length(batch: Mapping[str, Any]) -> int:
    """Return the number of tokens of a sequence.  Raises ValueError if the batch has no tokens."""
    main = next((batch[key] for key in _MAIN if isinstance(batch.get(key), Tensor)), None)
    if main is None or main.dim() < 2:
        raise ValueError(
            f"a batch with the keys {', '.join(map(str, batch)) or '(none)'}: sequences are split by the tokens of "
            f"{' or '.join(_MAIN)}, a tensor (batch, tokens, ...). Return a dict with one from the collate function."
        )
    return int(main.shape[1])


def _padded(key: str, value: Any, length: int, more: int, pad_id: int) -> Any:
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


def local_batch(batch: Batch, split: Split) -> Batch:
    """Return this rank's tokens.  Raises ValueError if they do not divide."""
    length = sequence_length(batch)
    split.check(length, "a batch")
    return {key: split.take(value) if _has_tokens(key, value, length) else value for key, value in batch.items()}


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
        """Wrap for the ranks of `group`, in its order.  See `prepare_batch` for pad_id; without it lengths must
        divide.
        """
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
