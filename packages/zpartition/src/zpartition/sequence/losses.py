"""The loss of a sequence that is shared out: a mean over all tokens that count, of all its ranks.

The mean of the ranks' means is another number as soon as they count differently many tokens, and NaN where one counts
none.  Here sums travel: the losses and the tokens, as one message of two numbers.

[Note: whose mean]  Partitions and the engine take the mean of gradients over all ranks that sum them, data and
sequence ranks alike.  A sequence counts once however many ranks it has, so what each adds to the loss goes back
`size` times: the mean over gradient ranks is then the mean over data ranks of the sum over sequence ranks.  A loop
that takes sums over sequence ranks instead divides by `size`.  In zengine `engine.backward(mean of this rank,
weight=its tokens)` is a way without any message of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup
from torch.nn.functional import cross_entropy

import zcomm
from zpartition.cells import Cell

__all__ = ["mean_over_sequence", "sequence_cross_entropy"]


class _Mean(Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, count: Tensor, cell: Cell) -> Tensor:
        sums = torch.stack([total.double(), count.double()])
        if cell.size > 1:
            zcomm.all_reduce(sums, cell.group, label="loss of a sequence")
        everybodys = sums[1].clamp(min=1.0)
        ctx.factor = cell.size / everybodys
        ctx.dtype = total.dtype
        return (sums[0] / everybodys).to(total.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (grad * ctx.factor).to(ctx.dtype), None, None


def mean_over_sequence(total: Tensor, count: Tensor | int, group: ProcessGroup | None = None) -> Tensor:
    """The sum of all ranks' `total` by the sum of their `count`: (), equal on all ranks; 0 if nothing counts.

    total: () floating, the sum of the losses of this rank's tokens.  count: how many of them count.  Collective of
    the group, forward only.  For the gradient see [Note: whose mean].
    """
    numbers = torch.as_tensor(count, device=total.device)
    mean: Tensor = _Mean.apply(  # type: ignore[no-untyped-call]
        total.reshape(()), numbers.reshape(()), Cell.of(group)
    )
    return mean


def sequence_cross_entropy(
    logits: Tensor, labels: Tensor, group: ProcessGroup | None = None, *, ignore_index: int = -100
) -> Tensor:
    """torch's cross_entropy of whole sequences, from the logits of each rank's tokens.

    logits: (..., vocabulary) of this rank's tokens; labels: (...) what each of them should say, shifted before the
    sequence was shared out (`shift_labels`).  () equal on all ranks; collective of the group.

    Raises:
        ValueError: the two are not of equally many tokens.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"logits of shape {list(logits.shape)} and labels of shape {list(labels.shape)} are not of the same "
            "tokens: share out shift_labels(labels) as the inputs were."
        )
    total = cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float() if logits.itemsize < 4 else logits.reshape(-1, logits.shape[-1]),
        labels.reshape(-1),
        ignore_index=ignore_index,
        reduction="sum",
    )
    return mean_over_sequence(total, (labels != ignore_index).sum(), group)
