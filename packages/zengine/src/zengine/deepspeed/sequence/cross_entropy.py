"""`deepspeed.sequence.cross_entropy`: the loss of each token of whole sequences."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import cross_entropy

from zpartition import sequence

__all__ = ["vocab_sequence_parallel_cross_entropy"]


def vocab_sequence_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    sp_group: ProcessGroup | None,
    tp_group: Any = None,
    *,
    ignore_index: int = -100,
    gather_sequence_loss: bool = True,
) -> Tensor:
    """Return (tokens, batch) float32: the loss of each token of all sequence ranks.

    vocab_parallel_logits: (tokens of this rank, batch, vocabulary); target: (tokens of this rank, batch).
    Gradients are scaled for the mean over the ranks that sum them, as engines expect.

    Raises ValueError if the vocabulary is split over tensor ranks.
    """
    if tp_group is not None:
        raise ValueError(
            "vocab_sequence_parallel_cross_entropy(tp_group=...): for a vocabulary that is split over tensor "
            "ranks use zpartition.tensor.vocabulary_cross_entropy. For whole logits omit tp_group."
        )
    flat = vocab_parallel_logits.flatten(0, -2).float()
    losses = cross_entropy(flat, target.flatten(), ignore_index=ignore_index, reduction="none").view(target.shape)
    return sequence.gather_sequence(losses, sp_group, dim=0) if gather_sequence_loss else losses
