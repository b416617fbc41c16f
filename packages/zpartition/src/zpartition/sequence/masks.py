"""What tokens of whole sequences may see of each other, from what each token carries with it.

A model that sees a piece of a sequence makes masks for the piece.  They are of no use to an attention over the whole,
and a mask over all pairs is too large to be sent.  Two numbers a token say as much: its position in its document
(positions that do not go on by one begin another: packed sequences) and whether it is padding.  `Tokens` has those of
all tokens; masks are made of them where an attention cannot do without.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, final

import attrs
import torch
from torch import Tensor

import zcomm
from zpartition.cells import Cell

__all__ = ["Looks", "Tokens", "Trait", "padding_of"]


@final
@attrs.frozen
class Looks:
    """How far a layer looks."""

    is_causal: bool = True
    window: int = 0  # tokens that each sees, itself included; 0: all


class Trait(enum.Flag):
    """What is unusual about a batch of sequences."""

    NONE = 0
    PACKED = enum.auto()  # some sequence has several documents
    PADDED = enum.auto()  # some token is none
    PADDED_BEFORE = enum.auto()  # and lies before one that is


@final
@attrs.define(eq=False)
class Tokens:
    """All tokens of a batch of sequences."""

    positions: Tensor  # (batch, tokens) int64
    is_valid: Tensor  # (batch, tokens) bool: False is padding
    documents: Tensor  # (batch, tokens) int64: a number for each
    traits: Trait
    made: dict[tuple[str, Looks], Any] = attrs.field(factory=dict)  # masks

    @classmethod
    def of(cls, positions: Tensor, is_valid: Tensor) -> Tokens:
        """From (batch, tokens) each.  Waits for the device."""
        starts = torch.diff(positions, dim=1, prepend=positions[:, :1] - 1) != 1
        begins = (is_valid[:, 1:] & ~is_valid[:, :-1]).any()
        facts = torch.stack([starts[:, 1:].any(), ~is_valid.all(), begins]).tolist()
        traits = Trait.NONE
        for trait, is_there in zip((Trait.PACKED, Trait.PADDED, Trait.PADDED_BEFORE), facts):
            traits |= trait if is_there else Trait.NONE
        return cls(positions, is_valid, starts.cumsum(1), traits)

    @classmethod
    def gathered(cls, positions: Tensor, is_valid: Tensor, cell: Cell) -> Tokens:
        """From those of each rank; one message of a number a token."""
        mine = (positions * 2 + is_valid).contiguous()
        found = mine.new_empty(cell.size, *mine.shape)
        zcomm.all_gather(found.view(-1), mine.view(-1), cell.group, label="positions")
        every = torch.cat(list(found), 1)
        return cls.of(every >> 1, every % 2 == 1)

    def needs_mask(self, looks: Looks) -> bool:
        """Whether `is_causal` alone does not say it all."""
        length = self.positions.shape[1]
        tells = Trait.PACKED | (Trait.PADDED_BEFORE if looks.is_causal else Trait.PADDED)
        return bool(self.traits & tells) or 0 < looks.window < length

    def dense(self, looks: Looks) -> Tensor:
        """(batch, 1, tokens, tokens) bool: True where a token (row) sees another; each sees itself."""
        if ("dense", looks) not in self.made:
            index = torch.arange(self.positions.shape[1], device=self.positions.device)
            behind = index.unsqueeze(1) - index
            sees = (self.documents.unsqueeze(2) == self.documents.unsqueeze(1)) & self.is_valid.unsqueeze(1)
            if looks.is_causal:
                sees &= behind >= 0
            if looks.window:
                sees &= behind < looks.window if looks.is_causal else behind.abs() < looks.window
            self.made["dense", looks] = (sees | (behind == 0)).unsqueeze(1)
        found: Tensor = self.made["dense", looks]
        return found

    def blocks(self, looks: Looks) -> Any:
        """The same as FlexAttention takes it."""
        if ("blocks", looks) not in self.made:
            from torch.nn.attention.flex_attention import create_block_mask

            documents, is_valid, (batch, length) = self.documents, self.is_valid, self.positions.shape

            def sees(b: Tensor, _head: Tensor, row: Tensor, column: Tensor) -> Tensor:
                found = (documents[b, row] == documents[b, column]) & is_valid[b, column]
                if looks.is_causal:
                    found = found & (row >= column)
                if looks.window:
                    near = row - column if looks.is_causal else (row - column).abs()
                    found = found & (near < looks.window)
                return found | (row == column)

            device = str(self.positions.device)
            self.made["blocks", looks] = create_block_mask(sees, batch, None, length, length, device=device)
        return self.made["blocks", looks]


def padding_of(mask: Any, like: Tensor) -> Tensor:
    """(batch, tokens) bool: which of a piece's tokens are none, told by the mask that a model made for the piece.

    mask: None, (batch, tokens) of 0 and 1, (batch, 1, tokens, tokens), boolean or added to scores, or FlexAttention's
    BlockMask.  The diagonal of what is made for pairs says it: a token that does not even see itself is padding.
    like: (batch, tokens).
    """
    sees = getattr(mask, "mask_mod", None)
    if sees is not None:
        return _diagonal(sees, like)
    if not isinstance(mask, Tensor):
        return torch.ones_like(like, dtype=torch.bool)
    if mask.dim() == 2:
        return mask.bool().expand(like.shape)
    own = mask[:, 0].diagonal(dim1=-2, dim2=-1)
    return (own if own.dtype == torch.bool else own == 0).expand(like.shape)


def _diagonal(sees: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], like: Tensor) -> Tensor:
    """(batch, tokens) bool: what a function of (sample, head, row, column) says of each token and itself.

    Called with one number each, as FlexAttention calls it: it may look up tensors by them.
    """
    samples, places = (torch.arange(size, device=like.device) for size in like.shape)
    first = places.new_zeros(())  # head

    def of(sample: Tensor, at: Tensor) -> Tensor:
        return sees(sample, first, at, at)

    alone = torch.vmap(of, in_dims=(None, 0))
    found: Tensor = torch.vmap(alone, in_dims=(0, None))(samples, places)
    return found.bool().expand(like.shape)
