"""A loss for each token of whole sequences, and the gradients of their mean."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import zcomm
import zengine.deepspeed as deepspeed
from zcomm.testing import run_ranks
from zengine.deepspeed.sequence.cross_entropy import (
    VocabParallelCrossEntropyLoss,
    vocab_parallel_cross_entropy,
    vocab_sequence_parallel_cross_entropy,
)
from zengine.deepspeed.sequence.vocab_parallel_ops import (
    vocab_parallel_entropy,
    vocab_parallel_kl_div,
    vocab_parallel_logprobs,
)


def _compare() -> list[float]:
    rank = zcomm.group_rank()
    torch.manual_seed(0)
    logits = torch.randn(6, 2, 5, requires_grad=True)
    labels = torch.arange(12).view(6, 2) % 5
    expected = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(6, 2)
    (wanted,) = torch.autograd.grad(expected.mean(), logits)
    part = logits.detach().chunk(2)[rank].clone().requires_grad_()
    losses = vocab_sequence_parallel_cross_entropy(part, labels.chunk(2)[rank], None)
    losses.mean().backward()
    own = vocab_sequence_parallel_cross_entropy(part, labels.chunk(2)[rank], None, gather_sequence_loss=False)
    pairs = [(losses, expected), (own, expected.chunk(2)[rank]), (part.grad / 2, wanted.chunk(2)[rank])]
    return [float((a - b).abs().max().detach()) for a, b in pairs]


def test_losses_are_gathered_and_gradients_are_those_of_the_mean_over_ranks() -> None:
    for found in run_ranks(_compare, 2):
        assert max(found) < 1e-6


SIZES = (4, 3)  # words of each tensor rank


def _agrees(found: Tensor, part: Tensor, wanted: Tensor, *wholes: Tensor) -> None:
    """Compare results, and gradients of weighted sums by `part` and, of its words, by the first of `wholes`."""
    torch.testing.assert_close(found, wanted)
    weights = torch.arange(1.0, found.numel() + 1).view(found.shape)
    (mine,) = torch.autograd.grad((found * weights).sum(), part, retain_graph=True)
    (whole,) = torch.autograd.grad((wanted * weights).sum(), wholes[0], retain_graph=True)
    torch.testing.assert_close(mine, whole.split(SIZES, -1)[zcomm.group_rank()])


def _split_vocabulary() -> None:
    torch.manual_seed(0)
    rank, group = zcomm.group_rank(), deepspeed.comm.get_world_group()
    logits, teacher = torch.randn(5, 2, 7, requires_grad=True), torch.randn(5, 2, 7)
    labels = torch.arange(10).view(5, 2) % 7
    labels[0, 0] = -100
    part = logits.detach().split(SIZES, -1)[rank].clone().requires_grad_()
    other = teacher.split(SIZES, -1)[rank]
    bounds = {"vocab_start_index": (0, 4)[rank], "vocab_end_index": (4, 7)[rank]}
    given = {"tp_group": group, **bounds}
    for reduction in ("none", "sum", "mean"):
        wanted = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)
        wanted = wanted.view(5, 2) if reduction == "none" else wanted
        _agrees(vocab_parallel_cross_entropy(part, labels, reduction=reduction, **given), part, wanted, logits)
    known = vocab_parallel_cross_entropy(part, labels, global_vocab_size=7, **given)
    torch.testing.assert_close(VocabParallelCrossEntropyLoss(**given, backend="liger")(part, labels), known)
    log_probs = logits.log_softmax(dim=-1)
    chosen = log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0].masked_fill(labels < 0, 0.0)
    _agrees(vocab_parallel_logprobs(part, labels, **given), part, chosen, logits)
    words = torch.tensor([[6, 0, 3]]).expand(5, 2, 3)
    _agrees(vocab_parallel_logprobs(part, words, **given), part, log_probs.gather(-1, words), logits)
    _agrees(vocab_parallel_entropy(part, group), part, -(log_probs.exp() * log_probs).sum(-1), logits)
    taught = teacher.log_softmax(dim=-1)
    forward, backward = (
        (taught.exp() * (taught - log_probs)).sum(-1),
        (log_probs.exp() * (log_probs - taught)).sum(-1),
    )
    _agrees(vocab_parallel_kl_div(part, other, tp_group=group), part, forward, logits)
    _agrees(vocab_parallel_kl_div(part, other, reverse=True, tp_group=group), part, backward, logits)
    masked = part.detach().clone()
    masked[0] = -torch.inf
    masked[1, :, :1] = -torch.inf
    masked.requires_grad_()
    entropy = vocab_parallel_entropy(masked, group)
    assert entropy.isnan().nonzero().tolist() == [[0, 0], [0, 1]]
    entropy[1:].sum().backward()
    assert masked.grad.isfinite().all()
    assert not masked.grad[0].any()
    _wrong_parts(part, labels, group)


def _wrong_parts(part: Tensor, labels: Tensor, group: object) -> None:
    for options, told in (
        ({}, "uneven parts need vocab_start_index"),
        ({"vocab_start_index": 0, "vocab_end_index": part.shape[-1]}, "must join from 0 on"),
        ({"vocab_start_index": 0}, "must be given together"),
        ({"reduction": "max"}, "reduction must be none, sum or mean"),
        ({"gather_sequence_loss": True}, "needs reduction='none' and sp_group="),
    ):
        with pytest.raises(ValueError, match=told):
            vocab_parallel_cross_entropy(part, labels, tp_group=group, **options)
    with pytest.raises(ValueError, match="9 is no word of a vocabulary of 3; only -100 is ignored"):
        vocab_parallel_logprobs(torch.zeros(1, 3), torch.tensor([9]))
    with pytest.raises(ValueError, match="leave out the last dim"):
        vocab_parallel_logprobs(torch.zeros(1, 3), torch.tensor([9, 9]))
    with pytest.raises(ValueError, match="both need the same shape"):
        vocab_parallel_kl_div(torch.zeros(1, 3), torch.zeros(1, 4))


def test_a_split_vocabulary_gives_losses_and_gradients_of_the_whole_one() -> None:
    run_ranks(_split_vocabulary, 2)


def _split_sequence() -> None:
    torch.manual_seed(0)
    rank, group = zcomm.group_rank(), deepspeed.comm.get_world_group()
    logits, labels = torch.randn(6, 2, 5), torch.arange(12).view(6, 2) % 5
    labels[0] = -100
    part, mine = logits.chunk(2)[rank], labels.chunk(2)[rank]
    for reduction in ("sum", "mean"):
        wanted = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)
        torch.testing.assert_close(
            vocab_parallel_cross_entropy(part, mine, sp_group=group, reduction=reduction), wanted
        )
    each = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(6, 2)
    found = vocab_parallel_cross_entropy(part, mine, sp_group=group, reduction="none", gather_sequence_loss=True)
    torch.testing.assert_close(found, each)


def test_the_loss_covers_all_sequence_ranks() -> None:
    run_ranks(_split_sequence, 2)
