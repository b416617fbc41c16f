"""`deepspeed.sequence.cross_entropy`: losses of sequences and vocabularies that are split over ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zengine.deepspeed.sequence.vocab_parallel_ops import log_sum_exp, logits_of, sum_over
from zengine.deepspeed.sequence.vocabulary import Vocabulary, tensor_ranks
from zpartition import sequence

__all__ = [
    "VocabParallelCrossEntropyLoss",
    "vocab_parallel_cross_entropy",
    "vocab_sequence_parallel_cross_entropy",
]


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    tp_group: ProcessGroup | None = None,
    sp_group: ProcessGroup | None = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    global_vocab_size: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    gather_sequence_loss: bool = False,
    backend: str = "torch",
) -> Tensor:
    """Return the loss of (tokens of this rank, ..., words of this rank) logits, over both kinds of ranks.

    target: (tokens of this rank, ...), equal on the tensor ranks.
    vocab_start_index and the next two: see `vocab_parallel_logprobs`.
    reduction: "mean" and "sum" cover all sequence ranks; "none" has the shape of `target`.
    gather_sequence_loss: with "none", the losses of all sequence ranks' tokens.
    backend: "torch" or "liger", which are the same here.

    Raises ValueError for other values, parts that do not join, or targets outside of the vocabulary.
    """
    _check(vocab_parallel_logits, target, sp_group, reduction, backend, gathers=gather_sequence_loss)
    bounds = (vocab_start_index, vocab_end_index)
    vocabulary = Vocabulary.of(vocab_parallel_logits, tp_group, bounds, global_vocab_size)
    vocabulary.check(target, ignore_index)
    is_ignored, logits = target == ignore_index, vocab_parallel_logits.float()
    words = target.masked_fill(is_ignored, 0).long()[..., None]
    picked = logits_of(logits, words, vocabulary.start, vocabulary.ranks)[..., 0]
    losses = (log_sum_exp(logits, vocabulary.ranks) - picked).masked_fill(is_ignored, 0.0)
    if reduction == "none":
        return sequence.gather_sequence(losses, sp_group, dim=0) if gather_sequence_loss else losses
    ranks = tensor_ranks(sp_group)
    total = sum_over(losses.sum(), ranks)
    count = (~is_ignored).sum()
    ranks.all_reduce(count)
    return total if reduction == "sum" else total / count.clamp(min=1)


def _check(logits: Tensor, target: Tensor, sp_group: Any, reduction: str, backend: str, *, gathers: bool) -> None:
    """Raise ValueError for arguments that do not fit each other."""
    if logits.shape[:-1] != target.shape:
        raise ValueError(f"logits of shape {list(logits.shape)} need a target of shape {list(logits.shape[:-1])}")
    if reduction not in ("none", "sum", "mean") or backend not in ("torch", "liger"):
        raise ValueError(
            f"reduction must be none, sum or mean and backend torch or liger, got {reduction!r}, {backend!r}"
        )
    if gathers and (reduction != "none" or sp_group is None):
        raise ValueError("gather_sequence_loss=True needs reduction='none' and sp_group=")


def vocab_sequence_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    sp_group: ProcessGroup | None,
    tp_group: ProcessGroup | None = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    ignore_index: int = -100,
    reduction: str = "none",
    gather_sequence_loss: bool = True,
    backend: str = "torch",
) -> Tensor:
    """Return (tokens, batch) float32: the loss of each token of all sequence ranks; see vocab_parallel_cross_entropy.

    vocab_parallel_logits: (tokens of this rank, batch, words of this tensor rank); target: (tokens of this rank,
    batch).  Gradients are scaled for the mean over the ranks that sum them, as engines expect.
    """
    if gather_sequence_loss and reduction != "none":
        raise ValueError(f"gather_sequence_loss=True gathers a loss for each token: reduction={reduction!r} has none")
    losses = vocab_parallel_cross_entropy(
        vocab_parallel_logits,
        target,
        tp_group,
        None if gather_sequence_loss else sp_group,
        vocab_start_index,
        vocab_end_index,
        ignore_index=ignore_index,
        reduction=reduction,
        backend=backend,
    )
    return sequence.gather_sequence(losses, sp_group, dim=0) if gather_sequence_loss else losses


class VocabParallelCrossEntropyLoss(nn.Module):
    """`vocab_parallel_cross_entropy` as a module."""

    def __init__(
        self,
        tp_group: ProcessGroup | None = None,
        sp_group: ProcessGroup | None = None,
        vocab_start_index: int | None = None,
        vocab_end_index: int | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        gather_sequence_loss: bool = False,
        backend: str = "torch",
    ) -> None:
        """Keep the arguments of the function."""
        super().__init__()
        self.tp_group, self.sp_group, self.ignore_index = tp_group, sp_group, ignore_index
        self.vocab_start_index, self.vocab_end_index = vocab_start_index, vocab_end_index
        self.reduction, self.gather_sequence_loss, self.backend = reduction, gather_sequence_loss, backend

    def forward(self, vocab_parallel_logits: Tensor, target: Tensor) -> Tensor:
        """Return the loss."""
        names = ("tp_group", "sp_group", "vocab_start_index", "vocab_end_index", "ignore_index", "reduction")
        given = {name: getattr(self, name) for name in (*names, "gather_sequence_loss", "backend")}
        return vocab_parallel_cross_entropy(vocab_parallel_logits, target, **given)
