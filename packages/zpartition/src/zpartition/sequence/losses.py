"""Losses of split sequences: a mean over all counted tokens of all sequence ranks.

The mean of the ranks' means is a different number if they count different numbers of tokens, and NaN if one counts
none.  So sums are reduced: losses and token counts, as one message of two numbers.  `gather_sequence` joins the
tokens of all ranks instead, for values of the whole sequence: a loss for each token, logits to inspect.

[Note: gradient scaling]  Partitions and the engine average gradients over all ranks that reduce them, data and
sequence ranks alike.  A sequence counts once for any number of ranks, so the backward of this mean is scaled by
`size`: the average over gradient ranks is then the average over data ranks of the sum over sequence ranks.  A loop
that sums over sequence ranks instead divides by `size`.  In zengine `engine.backward(mean of this rank, weight=its
tokens)` does the same without a message of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup
from torch.nn.functional import cross_entropy

import zcomm
from zpartition.layout.model_parallel import ModelParallelGroup
from zpartition.tensor.functions import gather_tokens

__all__ = ["gather_sequence", "mean_over_sequence", "sequence_cross_entropy"]


class _Mean(Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, count: Tensor, mp_group: ModelParallelGroup) -> Tensor:
        sums = torch.stack([total.double(), count.double()])
        if mp_group.size > 1:
            zcomm.all_reduce(sums, mp_group.group, label="loss of a sequence")
        total_count = sums[1].clamp(min=1.0)
        ctx.factor = mp_group.size / total_count
        ctx.dtype = total.dtype
        return (sums[0] / total_count).to(total.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (grad * ctx.factor).to(ctx.dtype), None, None


def mean_over_sequence(total: Tensor, count: Tensor | int, group: ProcessGroup | None = None) -> Tensor:
    """Divide the sum of all ranks' `total` by the sum of their `count`: (), equal on all ranks.

    The mean is 0 if nothing is counted.

    total: () floating, the sum of the losses of this rank's tokens.
    count: number of counted tokens.
    Collective of the group, in forward only.  For the gradient see [Note: gradient scaling].
    """
    numbers = torch.as_tensor(count, device=total.device)
    mean: Tensor = _Mean.apply(  # type: ignore[no-untyped-call]
        total.reshape(()), numbers.reshape(()), ModelParallelGroup.of(group)
    )
    return mean


def sequence_cross_entropy(
    logits: Tensor, labels: Tensor, group: ProcessGroup | None = None, *, ignore_index: int = -100
) -> Tensor:
    """Compute torch's cross_entropy of whole sequences from the logits of each rank's tokens.

    logits: (..., vocabulary) of this rank's tokens.
    labels: (...) next token of each, shifted before the sequence was split (`shift_labels`).
    Returns (), equal on all ranks; collective of the group.

    Raises:
        ValueError: logits and labels have different numbers of tokens.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"logits of shape {list(logits.shape)} and labels of shape {list(labels.shape)} are not of the same "
            "tokens: split shift_labels(labels) as the inputs."
        )
    total = cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float() if logits.itemsize < 4 else logits.reshape(-1, logits.shape[-1]),
        labels.reshape(-1),
        ignore_index=ignore_index,
        reduction="sum",
    )
    return mean_over_sequence(total, (labels != ignore_index).sum(), group)


def gather_sequence(x: Tensor, group: ProcessGroup | None = None, dim: int = 1) -> Tensor:
    """Join the ranks' tokens along `dim`, in rank order.  Differentiable; collective of the group.

    Each rank has equally many.  A token's gradient is the sum of the ranks' gradients: if all compute one loss of the
    whole, `size` times its own, as an average over gradient ranks requires (see [Note: gradient scaling]).
    """
    return gather_tokens(x, ModelParallelGroup.of(group), dim % x.dim())
