"""Parts of a vocabulary that tensor ranks hold, for losses of split logits."""

from __future__ import annotations

from typing import final

import attrs
from torch import Tensor
from torch.distributed import ProcessGroup

import zcomm
from zpartition import ModelParallelGroup

__all__ = ["Vocabulary", "tensor_ranks"]


def tensor_ranks(group: ProcessGroup | None) -> ModelParallelGroup:
    """Return the ranks of a tensor group; None means no split."""
    return ModelParallelGroup(None) if group is None else ModelParallelGroup.of(group)


@final
@attrs.frozen
class Vocabulary:
    """This rank's part of a vocabulary."""

    ranks: ModelParallelGroup
    start: int  # first word of this rank
    size: int  # words of all ranks

    @classmethod
    def of(
        cls,
        logits: Tensor,
        group: ProcessGroup | None,
        bounds: tuple[int | None, int | None],
        size: int | None = None,
    ) -> Vocabulary:
        """Return the vocabulary of (..., words of this rank) logits.  A collective of `group`, without `size`.

        bounds: [begin, end) of this rank's part; (None, None): equal parts in rank order.
        size: words of all ranks, given by a caller that has compared the parts.

        Raises ValueError, on every rank, if the parts do not join.
        """
        ranks, own = tensor_ranks(group), logits.shape[-1]
        begin, end = bounds
        if (begin is None) != (end is None) or (size is not None and begin is None):
            raise ValueError(
                "vocab_start_index and vocab_end_index must be given together, and with global_vocab_size; got "
                f"{begin}, {end} and {size}"
            )
        if size is not None and begin is not None:
            return cls(ranks, begin, size)
        mine = [own] if begin is None or end is None else [own, begin, end]
        everyone = zcomm.all_gather_object(mine, ranks.group) if ranks.size > 1 else [mine]
        starts = [sum(part[0] for part in everyone[:rank]) for rank in range(ranks.size)]
        are_joined = all(part[1:] in ([], [at, at + part[0]]) for part, at in zip(everyone, starts))
        are_equal = len(mine) == 3 or len({part[0] for part in everyone}) == 1
        if not are_joined or not are_equal or not all(part[0] for part in everyone):
            raise ValueError(
                f"the tensor ranks hold {[part[0] for part in everyone]} words at {[part[1:] for part in everyone]}: "
                "parts must not be empty and must join from 0 on; uneven parts need vocab_start_index and "
                "vocab_end_index"
            )
        return cls(ranks, starts[ranks.rank], sum(part[0] for part in everyone))

    def check(self, words: Tensor, ignore_index: int) -> None:
        """Raise ValueError for words outside of the vocabulary."""
        wrong = ((words < 0) | (words >= self.size)) & (words != ignore_index)
        if bool(wrong.any()):
            raise ValueError(
                f"{int(words[wrong][0])} is no word of a vocabulary of {self.size}; only {ignore_index} is ignored"
            )
