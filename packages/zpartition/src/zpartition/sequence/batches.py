"""Batches of whole sequences become each rank's tokens of them.

What must happen before sequences are cut, because the neighbour of the last token is on another rank:

- labels are shifted by one: `labels` become `shift_labels`, in which each token has what it should say next;
- tokens get their positions, unless the batch has some (packed documents count from 0 again and again).

Then everything that has a token dim is cut; what has none (a number for each sample, strings) goes to all as it is.

`SequenceBatches` is for loaders that give all sequence ranks the same batches, as zengine's do: nothing travels.  For
those that give each rank others see traded.py.
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

__all__ = ["Batch", "SequenceBatches", "piece_of", "prepared", "shift_labels"]

Batch = dict[str, Any]

IGNORED = -100  # the label of a token that is not counted, as torch's cross_entropy has it


def shift_labels(labels: Tensor, ignore_index: int = IGNORED) -> Tensor:
    """(..., tokens): for each token the label of the next one; the last has none."""
    return pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()


def prepared(batch: Mapping[str, Any], multiple: int = 1, pad_id: int | None = None) -> Batch:
    """A batch of whole sequences with everything in it that has to be made before they are cut.

    batch: `input_ids` or `inputs_embeds` (batch, tokens, ...), and what else there is; `labels` are taken out, and
        `shift_labels` and `position_ids` put in where they are missing.
    pad_id: a token to make the length a multiple of `multiple` with, at the end, where nothing is counted; None: the
        length stays as it is.
    """
    made, length = dict(batch), length_of(batch)
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


def length_of(batch: Mapping[str, Any]) -> int:
    """Tokens of a sequence.  Raises ValueError if the batch does not tell."""
    main = next((batch[key] for key in _MAIN if isinstance(batch.get(key), Tensor)), None)
    if main is None or main.dim() < 2:
        raise ValueError(
            f"a batch with the keys {', '.join(map(str, batch)) or '(none)'}: sequences are cut by the tokens of "
            f"{' or '.join(_MAIN)}, a tensor (batch, tokens, ...). Let the collate function return a dict with one."
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
    """Whether there is something to cut.  Raises ValueError for what is of another length."""
    if not isinstance(value, Tensor) or value.dim() < 2:
        return False
    if value.shape[1] != length:
        raise ValueError(
            f"{key} of shape {list(value.shape)} is not (batch, {length} tokens, ...). A mask over pairs of tokens "
            "cannot be shared out: leave it out, and say by position_ids where documents begin."
        )
    return True


def piece_of(batch: Batch, split: Split) -> Batch:
    """This rank's tokens.  Raises ValueError if they do not divide."""
    length = length_of(batch)
    split.check(length, "a batch")
    return {key: split.take(value) if _has_tokens(key, value, length) else value for key, value in batch.items()}


@final
@attrs.define(eq=False)
class SequenceBatches:
    """Around a loader (anything to iterate over) that yields the same dicts on all sequence ranks."""

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
        """For the ranks of `group`, in its order.  See `prepared` for pad_id; without it lengths have to divide."""
        return cls(loader, Split(zcomm.group_size(group), zcomm.group_rank(group), order), pad_id)

    def __iter__(self) -> Iterator[Batch]:
        """Each batch, this rank's tokens of it.  Raises ValueError with the numbers if they do not divide."""
        for batch in self.loader:
            yield self.piece(batch)

    def piece(self, batch: Mapping[str, Any]) -> Batch:
        """This rank's tokens of one batch."""
        return piece_of(prepared(batch, self.split.multiple, self.pad_id), self.split)

    def __len__(self) -> int:
        """Batches, if the loader tells."""
        return len(self.loader)  # type: ignore[arg-type]
