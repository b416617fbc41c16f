"""Attention masks over whole sequences, built from two numbers per token.

A model that sees a piece of a sequence builds masks for the piece.  They do not apply to attention over the whole,
and a mask over all pairs is too large to send.  Two numbers per token suffice: its position in its document
(positions that do not increase by one start another document: packed sequences) and whether it is padding.  `Tokens`
holds them for all tokens; masks are built from them if an attention needs one.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, final

import attrs
import torch
from torch import Tensor

import zcomm
from zpartition.layout.model_parallel import ModelParallelGroup

__all__ = ["BatchTrait", "MaskKind", "Tokens", "padding_of"]


@final
@attrs.frozen
class MaskKind:
    """Kind of mask of a layer."""

    is_causal: bool = True
    window: int = 0  # number of tokens that each token sees, itself included; 0: all


class BatchTrait(enum.Flag):
    """Properties of a batch of sequences that need a mask."""

    NONE = 0
    PACKED = enum.auto()  # some sequence has several documents
    PADDED = enum.auto()  # some token is padding
    PADDED_BEFORE = enum.auto()  # and precedes a token that is not


@final
@attrs.define(eq=False)
class Tokens:
    """All tokens of a batch of sequences."""

    positions: Tensor  # (batch, tokens) int64
    is_valid: Tensor  # (batch, tokens) bool: False is padding
    documents: Tensor  # (batch, tokens) int64: a number for each
    traits: BatchTrait
    cache: dict[tuple[str, MaskKind], Any] = attrs.field(factory=dict)  # masks

    @classmethod
    def of(cls, positions: Tensor, is_valid: Tensor) -> Tokens:
        """Build from (batch, tokens) each.  Synchronizes with the device."""
        starts = torch.diff(positions, dim=1, prepend=positions[:, :1] - 1) != 1
        begins = (is_valid[:, 1:] & ~is_valid[:, :-1]).any()
        found = torch.stack([starts[:, 1:].any(), ~is_valid.all(), begins]).tolist()
        traits = BatchTrait.NONE
        for trait, is_there in zip((BatchTrait.PACKED, BatchTrait.PADDED, BatchTrait.PADDED_BEFORE), found):
            traits |= trait if is_there else BatchTrait.NONE
        return cls(positions, is_valid, starts.cumsum(1), traits)

    @classmethod
    def gather(cls, positions: Tensor, is_valid: Tensor, mp_group: ModelParallelGroup) -> Tokens:
        """Gather from all ranks; one message of a number per token."""
        mine = (positions * 2 + is_valid).contiguous()
        found = mine.new_empty(mp_group.size, *mine.shape)
        zcomm.all_gather(found.view(-1), mine.view(-1), mp_group.group, label="positions")
        every = torch.cat(list(found), 1)
        return cls.of(every >> 1, every % 2 == 1)

    def needs_mask(self, mask_kind: MaskKind) -> bool:
        """Check if `is_causal` alone is not sufficient."""
        length = self.positions.shape[1]
        masked = BatchTrait.PACKED | (BatchTrait.PADDED_BEFORE if mask_kind.is_causal else BatchTrait.PADDED)
        return bool(self.traits & masked) or 0 < mask_kind.window < length

    def dense(self, mask_kind: MaskKind) -> Tensor:
        """(batch, 1, tokens, tokens) bool: True where a token (row) sees another; each sees itself."""
        if ("dense", mask_kind) not in self.cache:
            index = torch.arange(self.positions.shape[1], device=self.positions.device)
            behind = index.unsqueeze(1) - index
            sees = (self.documents.unsqueeze(2) == self.documents.unsqueeze(1)) & self.is_valid.unsqueeze(1)
            if mask_kind.is_causal:
                sees &= behind >= 0
            if mask_kind.window:
                sees &= behind < mask_kind.window if mask_kind.is_causal else behind.abs() < mask_kind.window
            self.cache["dense", mask_kind] = (sees | (behind == 0)).unsqueeze(1)
        found: Tensor = self.cache["dense", mask_kind]
        return found

    def blocks(self, mask_kind: MaskKind) -> Any:
        """Return the same mask as a BlockMask for FlexAttention."""
        if ("blocks", mask_kind) not in self.cache:
            from torch.nn.attention.flex_attention import create_block_mask

            documents, is_valid, (batch, length) = self.documents, self.is_valid, self.positions.shape

            def sees(b: Tensor, _head: Tensor, row: Tensor, column: Tensor) -> Tensor:
                found = (documents[b, row] == documents[b, column]) & is_valid[b, column]
                if mask_kind.is_causal:
                    found = found & (row >= column)
                if mask_kind.window:
                    near = row - column if mask_kind.is_causal else (row - column).abs()
                    found = found & (near < mask_kind.window)
                return found | (row == column)

            device = str(self.positions.device)
            self.cache["blocks", mask_kind] = create_block_mask(sees, batch, None, length, length, device=device)
        return self.cache["blocks", mask_kind]


def padding_of(mask: Any, like: Tensor) -> Tensor:
    """(batch, tokens) bool: False for padding, read from the mask that a model built for its piece.

    mask: None, (batch, tokens) of 0 and 1, (batch, 1, tokens, tokens), boolean or added to scores, or FlexAttention's
        BlockMask.  In a mask over pairs the diagonal is decisive: a token that does not see itself is padding.
    like: (batch, tokens).
    """
    sees = getattr(mask, "mask_mod", None)
    if sees is not None:
        return _evaluate_diagonal(sees, like)
    if not isinstance(mask, Tensor):
        return torch.ones_like(like, dtype=torch.bool)
    if mask.dim() == 2:
        return mask.bool().expand(like.shape)
    own = mask[:, 0].diagonal(dim1=-2, dim2=-1)
    return (own if own.dtype == torch.bool else own == 0).expand(like.shape)


def _evaluate_diagonal(sees: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], like: Tensor) -> Tensor:
    """(batch, tokens) bool: a function of (sample, head, row, column), for each token and itself.

    Called with one number each, as FlexAttention calls it: it may index tensors by them.
    """
    samples, places = (torch.arange(size, device=like.device) for size in like.shape)
    first = places.new_zeros(())  # head

    def of(sample: Tensor, at: Tensor) -> Tensor:
        return sees(sample, first, at, at)

    alone = torch.vmap(of, in_dims=(None, 0))
    found: Tensor = torch.vmap(alone, in_dims=(0, None))(samples, places)
    return found.bool().expand(like.shape)
