"""`deepspeed.sequence.vocab_parallel_ops`: log-probabilities, entropy and KL divergence of split vocabularies.

Logits are (..., this tensor rank's part of the vocabulary), in rank order.  Results are float32 and equal on the
tensor ranks, which must all back-propagate the same loss.  A row of only -inf has no distribution: its entropy and
divergence are NaN, with gradients of zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup, ReduceOp

from zengine.deepspeed.comm import all_reduce
from zengine.deepspeed.sequence.vocabulary import Vocabulary, tensor_ranks
from zpartition import ModelParallelGroup, tensor

__all__ = ["vocab_parallel_entropy", "vocab_parallel_kl_div", "vocab_parallel_logprobs"]


class _LogSumExp(Function):
    """(...): logarithm of the sum of exponentials over the whole vocabulary."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ranks: ModelParallelGroup) -> Tensor:
        top = logits.amax(dim=-1)
        if ranks.size > 1:
            all_reduce(top, op=ReduceOp.MAX, group=ranks.group)
        total = (logits - top[..., None]).exp().sum(dim=-1)
        ranks.all_reduce(total)
        found = top + total.log()
        ctx.save_for_backward(logits, found)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        logits, found = ctx.saved_tensors
        return grads[0][..., None] * (logits - found[..., None]).exp(), None


def log_sum_exp(logits: Tensor, ranks: ModelParallelGroup) -> Tensor:
    """(...) float32, equal on all ranks.  logits: float32."""
    found: Tensor = _LogSumExp.apply(logits, ranks)  # type: ignore[no-untyped-call]
    return found


def sum_over(x: Tensor, ranks: ModelParallelGroup) -> Tensor:
    """Return the sum of the ranks' `x`."""
    return tensor.reduce(x.contiguous(), ranks) if ranks.size > 1 else x


def logits_of(logits: Tensor, index: Tensor, start: int, ranks: ModelParallelGroup) -> Tensor:
    """(..., k): the logits of words, whichever rank has them.  index: (..., k), numbers in the whole vocabulary."""
    local = index - start
    is_own = (local >= 0) & (local < logits.shape[-1])
    found = logits.gather(-1, local.clamp(0, logits.shape[-1] - 1))
    return sum_over(torch.where(is_own, found, 0.0), ranks)


def vocab_parallel_logprobs(
    vocab_parallel_logits: Tensor,
    index: Tensor,
    tp_group: ProcessGroup | None = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    global_vocab_size: int | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Return the log-probabilities of words, in the shape of `index`; 0 where it is `ignore_index`.

    index: (...) as the logits without their last dim, or with one more dim of k words; equal on all tensor ranks.
    vocab_start_index, vocab_end_index: this rank's part; by default equal parts.
    global_vocab_size: with both, the parts are not compared.

    Raises ValueError, on every tensor rank, for other shapes, parts that do not join, or words outside.
    """
    is_single = index.shape == vocab_parallel_logits.shape[:-1]
    if not is_single and index.shape[:-1] != vocab_parallel_logits.shape[:-1]:
        raise ValueError(
            f"index of shape {list(index.shape)} does not match logits of shape {list(vocab_parallel_logits.shape)}: "
            "leave out the last dim, or give k words there"
        )
    vocabulary = Vocabulary.of(
        vocab_parallel_logits, tp_group, (vocab_start_index, vocab_end_index), global_vocab_size
    )
    vocabulary.check(index, ignore_index)
    words = (index[..., None] if is_single else index).long()
    logits, is_ignored = vocab_parallel_logits.float(), words == ignore_index
    picked = logits_of(logits, words.masked_fill(is_ignored, 0), vocabulary.start, vocabulary.ranks)
    found = (picked - log_sum_exp(logits, vocabulary.ranks)[..., None]).masked_fill(is_ignored, 0.0)
    return found[..., 0] if is_single else found


def vocab_parallel_entropy(vocab_parallel_logits: Tensor, tp_group: ProcessGroup | None = None) -> Tensor:
    """(...): entropy of each token's distribution."""
    ranks = tensor_ranks(tp_group)
    log_probs, is_undefined = _log_probs(vocab_parallel_logits, ranks)
    probs = log_probs.exp()
    own = torch.where(probs > 0, -probs * torch.where(probs > 0, log_probs, 0.0), 0.0).sum(dim=-1)
    return sum_over(own, ranks).masked_fill(is_undefined, torch.nan)


def vocab_parallel_kl_div(
    student_logits: Tensor, teacher_logits: Tensor, reverse: bool = False, tp_group: ProcessGroup | None = None
) -> Tensor:
    """(...): KL(teacher || student) of each token, or with `reverse` KL(student || teacher).

    Both are split in the same way, and both get gradients.  Raises ValueError for different shapes.
    """
    if student_logits.shape != teacher_logits.shape:
        raise ValueError(
            f"student_logits have shape {list(student_logits.shape)}, teacher_logits {list(teacher_logits.shape)}: "
            "both need the same shape and split"
        )
    ranks = tensor_ranks(tp_group)
    student, teacher = _log_probs(student_logits, ranks), _log_probs(teacher_logits, ranks)
    (weights, no_weights), (other, no_other) = (student, teacher) if reverse else (teacher, student)
    probs = weights.exp()
    ratio = torch.where(probs > 0, weights, 0.0) - torch.where(probs > 0, other, 0.0)
    own = torch.where(probs > 0, probs * ratio, 0.0).sum(dim=-1)
    return sum_over(own, ranks).masked_fill(no_weights | no_other, torch.nan)


def _log_probs(logits: Tensor, ranks: ModelParallelGroup) -> tuple[Tensor, Tensor]:
    """Return (this rank's log-probabilities, (...) bool: rows of only -inf, whose logits are taken as 0)."""
    values = logits.float()
    most = values.detach().amax(dim=-1)
    if ranks.size > 1:
        all_reduce(most, op=ReduceOp.MAX, group=ranks.group)
    is_undefined = most == -torch.inf
    values = torch.where(is_undefined[..., None], 0.0, values)
    total = log_sum_exp(values, ranks)
    shared = tensor.copy(total, ranks) if ranks.size > 1 else total  # every rank adds to its gradient
    return values - shared[..., None], is_undefined
