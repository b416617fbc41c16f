"""Tensor split of a recognized decoder, for generation: parts of matrices, and of heads, of each rank of a group.

Queries, keys, values and the MLP's first projections are cut by rows (their outputs), the projections after them by
columns, whose results are added up (Shoeybi et al. 2019, section 3); the vocabulary is cut by rows, in the embedding
and in the head, whose logits are joined.  So every rank has the same bits of every logit, and chooses the same token.
Norms, biases of sums and learnt positions are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F

import zcomm
from zengine.inference.structure import MLP, Attention, Decoder, Embedding, FusedQKV, Norm, Over, Projection, Ranks
from zpartition import ModelParallelGroup
from zprecision.quant import PackedTensor, QuantizedTensor

__all__ = ["WHOLE", "Cut", "TensorSplit", "split_of"]


@attrs.frozen(eq=False)
class Cut:
    """Part of a projection that a rank keeps: all of it, by default."""

    rows: Tensor | None = None  # (n,) int64 on the host; None: all
    columns: Tensor | None = None
    ranks: Ranks | None = None

    def weight(self, matrix: Tensor) -> Tensor:
        """Return a copy of the part of a matrix, (out, in)."""
        part = matrix if self.rows is None else matrix[self.rows.to(matrix.device)]
        if self.columns is not None:
            part = part[:, self.columns.to(matrix.device)]
        return part.clone(memory_format=torch.contiguous_format) if part is matrix else part.contiguous()

    def with_parts(self, whole: Projection, weight: Tensor | QuantizedTensor | PackedTensor) -> Projection:
        """Return the projection with a part of its weight, and that of its bias."""
        bias = whole.bias
        if bias is not None:
            bias = bias.detach().clone() if self.rows is None else bias.detach()[self.rows.to(bias.device)]
        return attrs.evolve(whole, weight=weight, bias=bias, ranks=self.ranks)


@attrs.frozen(eq=False)
class _SplitLookup:
    """Embedding of which each rank has some rows."""

    rows: Tensor  # (n, width)
    first: int  # token of the first row
    group: ModelParallelGroup

    def __call__(self, ids: Tensor) -> Tensor:
        """ids: (...) int64.  Returns (..., width), equal on all ranks: a row and zeros are added up."""
        is_elsewhere = (ids < self.first) | (ids >= self.first + self.rows.shape[0])
        found = F.embedding((ids - self.first).masked_fill(is_elsewhere, 0), self.rows)
        found = found.masked_fill(is_elsewhere.unsqueeze(-1), 0)
        zcomm.all_reduce(found, self.group.group, label="embeddings of tokens")
        return found


@attrs.frozen(eq=False)
class TensorSplit:
    """Parts of one rank; one rank has all."""

    cuts: Mapping[str, Cut] = attrs.field(factory=dict)  # by the name of the projection
    vocabulary: tuple[int, int, int] = (0, 0, 0)  # first token and end of this rank, tokens of all; all 0: not split
    group: ModelParallelGroup = ModelParallelGroup(None)  # noqa: RUF009 - a frozen value

    def cut(self, projection: Projection) -> Cut:
        """Return the part of a projection."""
        return self.cuts.get(projection.name, _ALL)

    def attention(self, attention: Attention) -> Attention:
        """Return an attention of this rank's heads."""
        size = self.group.size
        return attrs.evolve(
            attention, num_heads=attention.num_heads // size, num_kv_heads=attention.num_kv_heads // size
        )

    def tokens(self, table: Tensor) -> Tensor:
        """Return a copy of this rank's rows of the embedding."""
        first, end, total = self.vocabulary
        return table[first:end].clone() if total else table.clone()

    def embedding(self, own: Embedding) -> Embedding:
        """Return an embedding over the rows of `tokens`."""
        first, _, total = self.vocabulary
        if not total:
            return own
        return attrs.evolve(own, lookup=_SplitLookup(own.tokens, first, self.group), num_tokens=total)


_ALL, WHOLE = Cut(), TensorSplit()


def split_of(decoder: Decoder, group: ModelParallelGroup) -> TensorSplit:
    """Return this rank's parts of a decoder, whose weights are whole.  Sends nothing.

    Raises ValueError, by numbers, if heads do not divide, and for blocks that have no split.
    """
    if group.size == 1:
        return WHOLE
    maker = _Maker(group)
    for block in decoder.blocks:
        maker.attention(block.name, block.attention)
        if not isinstance(block.mlp, MLP):
            raise ValueError(
                f"{block.name} has a {type(block.mlp).__name__}, which is not split over {group.size} ranks: leave "
                "hybrid_engine.inference_tp_size at 1"
            )
        maker.mlp(block.mlp)
    head, total = decoder.head.projection, decoder.embedding.tokens.shape[0]
    rows = head.weight.shape[0]
    maker.rows(head, torch.arange(*maker.bounds(rows)), maker.sizes(rows), Over.OUTPUTS)
    return TensorSplit(maker.cuts, (*maker.bounds(total), total), group)


@final
@attrs.frozen(eq=False)
class _Maker:
    """Cuts of one rank."""

    group: ModelParallelGroup
    cuts: dict[str, Cut] = attrs.field(factory=dict)

    def sizes(self, total: int) -> tuple[int, ...]:
        """Return the elements of each rank: the first ones have one more if they do not divide."""
        size = self.group.size
        return tuple(total // size + (rank < total % size) for rank in range(size))

    def bounds(self, total: int) -> tuple[int, int]:
        """Return the first element of this rank, and the first of the next."""
        sizes, rank = self.sizes(total), self.group.rank
        return sum(sizes[:rank]), sum(sizes[: rank + 1])

    def rows(
        self, projection: Projection, rows: Tensor, sizes: tuple[int, ...] = (), over: Over | None = None
    ) -> None:
        ranks = None if over is None else Ranks(over, self.group, output_sizes=sizes)
        self.cuts[projection.name] = Cut(rows=rows, ranks=ranks)

    def columns(self, projection: Projection, columns: Tensor, sizes: tuple[int, ...]) -> None:
        self.cuts[projection.name] = Cut(columns=columns, ranks=Ranks(Over.COLUMNS, self.group, sizes))

    def attention(self, name: str, attention: Attention) -> None:
        size, heads, groups = self.group.size, attention.num_heads, attention.num_kv_heads
        for what, count in (("attention heads", heads), ("key heads", groups)):
            if count % size:
                raise ValueError(
                    f"{name} has {count} {what}, which hybrid_engine.inference_tp_size = {size} does not divide: use "
                    "a divisor of both"
                )
        for norm in (attention.query_norm, attention.key_norm):
            if _spans_heads(norm, attention.head_size):
                raise ValueError(
                    f"{name} has a norm over all heads, so they cannot be split over {size} ranks: leave "
                    "hybrid_engine.inference_tp_size at 1"
                )
        queries, keys = self._heads(heads, attention.head_size), self._heads(groups, attention.head_size)
        q, kv = heads * attention.head_size, groups * attention.head_size
        if attention.fused is None:
            for projection, rows in zip(attention.projections, (queries, keys, keys)):
                self.rows(projection, rows)
        elif attention.fused is FusedQKV.STACKED:
            self.rows(attention.projections[0], torch.cat((queries, q + keys, q + kv + keys)))
        else:
            self.rows(attention.projections[0], self._heads(groups, (heads // groups + 2) * attention.head_size))
        self.columns(attention.out, queries, (q // size,) * size)

    def _heads(self, count: int, head_size: int) -> Tensor:
        """Return the features of this rank's heads."""
        first, end = self.bounds(count)
        return torch.arange(first * head_size, end * head_size)

    def mlp(self, mlp: MLP) -> None:
        width = mlp.down.weight.shape[1]
        own = torch.arange(*self.bounds(width))
        self.rows(mlp.up, torch.cat((own, width + own)) if mlp.is_fused else own)
        if mlp.gate is not None:
            self.rows(mlp.gate, own)
        self.columns(mlp.down, own, self.sizes(width))


def _spans_heads(norm: Norm | None, head_size: int) -> bool:
    return norm is not None and norm.weight is not None and norm.weight.numel() != head_size
