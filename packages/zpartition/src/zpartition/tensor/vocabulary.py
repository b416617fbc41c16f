"""Vocabulary-parallel embedding and cross-entropy.

An embedding that post-processes torch's lookup (Gemma's scales it) keeps doing so: its class is put in front of ours,
whose lookup its `super().forward` then calls.

The loss never gathers the logits: three numbers per token are sent (the maximum; the sum of exponentials and the
logit of the label, as one message), and the gradient of each rank's logits is local (Shoeybi et al. 2019, section 3).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import embedding

import zcomm
from zpartition.layout.model_parallel import ModelParallelGroup
from zpartition.tensor import functions
from zpartition.tensor.layers import ColumnLinear, SplitLayer

__all__ = ["VocabularyEmbedding", "vocabulary_class", "vocabulary_cross_entropy"]

_made_classes: dict[type[nn.Module], type[nn.Module]] = {}


class VocabularyEmbedding(SplitLayer, nn.Embedding):
    """nn.Embedding of which each rank holds some rows; `num_embeddings` is this rank's number."""

    def forward(self, input: Tensor) -> Tensor:
        """Look up integers (...) -> (..., embedding_dim), equal on all ranks.

        Raises IndexError for an index outside the whole vocabulary (on a CPU, where the check needs no
        synchronization).
        """
        (lo, hi), _ = self.placement.addresses["weight"].boxes[0]
        if input.is_cpu and input.numel():
            self._check_tokens(input)
        is_elsewhere = (input < lo) | (input >= hi)
        local = (input - lo).masked_fill(is_elsewhere, 0)
        rows = embedding(local, self.weight, self._own_padding(lo, hi)).masked_fill(is_elsewhere.unsqueeze(-1), 0)
        if self.placement.is_joined:
            self.placement.parallel_region.begin_scattered(rows, self)
            return self.placement.parallel_region.reduce(rows)
        return functions.reduce(rows, self.mp_group) if self.mp_group.size > 1 else rows

    def _own_padding(self, lo: int, hi: int) -> int | None:
        """Return the local row that gets no gradient."""
        padding = self.padding_idx
        return padding - lo if padding is not None and lo <= padding < hi else None

    def _check_tokens(self, input: Tensor) -> None:
        size = self.placement.addresses["weight"].global_shape[0]
        lowest, highest = torch.aminmax(input)
        if lowest < 0 or highest >= size:
            raise IndexError(
                f"token {int(lowest if lowest < 0 else highest)} is outside the vocabulary, 0 to {size - 1}."
            )


def vocabulary_class(module: nn.Module) -> type[nn.Module] | None:
    """Return the split class for `module`; None if it is no embedding, or does its own lookup."""
    kind = type(module)
    if kind is nn.Embedding:
        return VocabularyEmbedding
    if not issubclass(kind, nn.Embedding) or issubclass(kind, SplitLayer) or not _calls_torch_forward(kind):
        return None
    if kind not in _made_classes:
        _made_classes[kind] = type(f"Vocabulary{kind.__name__}", (kind, VocabularyEmbedding), {})
    return _made_classes[kind]


def _calls_torch_forward(kind: type[nn.Embedding]) -> bool:
    """Check if rows are looked up by nn.Embedding's forward."""
    code = getattr(kind.forward, "__code__", None)
    calls_super = code is not None and "__class__" in code.co_freevars and "embedding" not in code.co_names
    return kind.forward is nn.Embedding.forward or calls_super


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, start: int, mp_group: ModelParallelGroup) -> Tensor:
        """(n, this rank's part) float, (n,) -> (n,) float32 or float64."""
        wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        peak = wide.amax(1)
        zcomm.all_reduce(peak, mp_group.group, op="max", label="largest logits")
        shifted = wide - peak.unsqueeze(1)
        is_elsewhere = (labels < start) | (labels >= start + logits.shape[1])
        local = (labels - start).masked_fill(is_elsewhere, 0)
        chosen = shifted.gather(1, local.unsqueeze(1)).squeeze(1).masked_fill(is_elsewhere, 0)
        exponentials = shifted.exp_()
        sums = torch.stack([exponentials.sum(1), chosen])
        zcomm.all_reduce(sums, mp_group.group, label="sums of exponentials")
        exponentials /= sums[0].unsqueeze(1)
        ctx.save_for_backward(exponentials, local, is_elsewhere)
        ctx.dtype = logits.dtype
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        probabilities, local, is_elsewhere = ctx.saved_tensors
        here = torch.where(is_elsewhere, 0.0, 1.0).to(probabilities.dtype).unsqueeze(1)
        grad_logits = probabilities.scatter_add(1, local.unsqueeze(1), -here)
        return (grad_logits * grad.unsqueeze(1)).to(ctx.dtype), None, None, None


def vocabulary_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    head: ColumnLinear,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:
    """Compute torch's cross_entropy of logits that are split over tensor ranks as the layer `head` returns them.

    logits: (n, this rank's part of the vocabulary).
    labels: (n,) integers, equal on all ranks.
    The loss is (), or (n,) for reduction "none", equal on all ranks.

    Raises:
        ValueError: the logits are not this rank's part, or a label is outside the vocabulary (checked on a CPU).
    """
    address = head.placement.addresses["weight"]
    start, stop = address.boxes[0][0]
    if logits.dim() != 2 or logits.shape[1] != stop - start or head.placement.is_joined:
        raise ValueError(
            f"logits of shape {list(logits.shape)} are not (tokens, {stop - start}), this rank's part of a "
            f"vocabulary of {address.global_shape[0]}. Pass the output of the head, flattened to two dims, under "
            "Column() without gathers=True; for whole logits use torch's cross_entropy."
        )
    ignored = labels == ignore_index
    if labels.is_cpu and bool(((labels >= address.global_shape[0]) | (labels < 0)).logical_and(~ignored).any()):
        raise ValueError(
            f"labels range from {int(labels.min())} to {int(labels.max())}; allowed are 0 to "
            f"{address.global_shape[0] - 1}, and ignore_index={ignore_index}."
        )
    losses: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, labels.masked_fill(ignored, 0), start, head.mp_group
    )
    losses = losses.masked_fill(ignored, 0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (~ignored).sum()
