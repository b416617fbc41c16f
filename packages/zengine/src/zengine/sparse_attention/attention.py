"""Self-attention over a block layout: by torch's scaled_dot_product_attention, or by FlexAttention's block masks.

SDPA takes the layout as a mask of tokens, on any device and in any dtype: the pattern is exact, and nothing is saved.
FlexAttention skips empty blocks when it is compiled, so long sequences cost what their layout has; its masks are made
from the same layout.  There is no Triton code of our own.

DeepSpeed's layer runs in fp16 only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zengine.sparse_attention.layouts import FixedSparsityConfig, SparsityConfig

__all__ = ["BertSparseSelfAttention", "SparseSelfAttention", "block_mask", "token_mask"]

Implementation = Literal["sdpa", "flex"]
MaskMode = Literal["add", "mul"]


def token_mask(layout: Tensor, block: int) -> Tensor:
    """Return a layout, (heads, n, n), as a mask of tokens, (heads, n * block, n * block) bool: True attends."""
    return layout.bool().repeat_interleave(block, -2).repeat_interleave(block, -1)


def block_mask(layout: Tensor, block: int, *, block_size: int = 128) -> Any:
    """Return a layout, (heads, n, n), as FlexAttention's BlockMask on the layout's device.

    block_size: of FlexAttention's own blocks; it computes those that have a token to attend to.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    attends = layout.bool()

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return attends[head, query // block, key // block]

    length = layout.shape[-1] * block
    return create_block_mask(
        mask_mod, None, len(layout), length, length, device=str(layout.device), BLOCK_SIZE=block_size
    )


class SparseSelfAttention(nn.Module):
    """Attention of (batch, heads, tokens, size) tensors over the layout of `sparsity_config`.

    key_padding_mask_mode, attn_mask_mode: "add": the mask is added to the scores; "mul": scores where it is 0 are
        left out.
    max_seq_length: length of the layout; shorter sequences use its first blocks.
    implementation: "sdpa", or "flex", whose compiled form skips empty blocks; with masks of tokens SDPA runs.

    The buffer `master_layout`, (heads, blocks, blocks) int64, is in the state dict, as in DeepSpeed.

    Raises ValueError for an unknown mode or implementation.
    """

    master_layout: Tensor

    def __init__(
        self,
        sparsity_config: SparsityConfig | None = None,
        key_padding_mask_mode: MaskMode = "add",
        attn_mask_mode: MaskMode = "mul",
        max_seq_length: int = 2048,
        implementation: Implementation = "sdpa",
    ) -> None:
        super().__init__()
        for name, value in (("key_padding_mask_mode", key_padding_mask_mode), ("attn_mask_mode", attn_mask_mode)):
            if value not in get_args(MaskMode):
                raise ValueError(f'{name} = {value!r} must be "add" or "mul"')
        if implementation not in get_args(Implementation):
            raise ValueError(f'implementation = {implementation!r} must be "sdpa" or "flex"')
        self.sparsity_config = sparsity_config or FixedSparsityConfig(num_heads=4)
        self.register_buffer("master_layout", self.sparsity_config.make_layout(max_seq_length))
        self.key_padding_mask_mode, self.attn_mask_mode = key_padding_mask_mode, attn_mask_mode
        self.implementation = implementation
        self._masks: dict[tuple[int, torch.device, str], Any] = {}  # made from the layout, by length
        self._made_of: tuple[Tensor | None, int] = (None, -1)  # the layout that the masks are made from, its version

    def get_layout(self, length: int) -> Tensor:
        """Return the layout of sequences of `length` tokens.  Raises ValueError if blocks do not fit."""
        block, longest = self.sparsity_config.block, self.master_layout.shape[-1] * self.sparsity_config.block
        if length % block or length > longest:
            raise ValueError(
                f"a sequence of {length} tokens: the layout has blocks of {block} tokens, up to {longest}. Pad the "
                "sequence to whole blocks (SparseAttentionUtils.pad_to_block_size), or raise max_seq_length"
            )
        return self.master_layout[..., : length // block, : length // block]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the attention, (batch, heads, tokens, size), of tensors of that shape.

        key: or (batch, heads, size, tokens).
        rpe: added to the scaled scores; broadcast to (batch, heads, tokens, tokens).
        key_padding_mask: (batch, tokens), or with dimensions of size 1 between.
        attn_mask: (tokens, tokens), or with dimensions of size 1 before.

        Raises:
            ValueError: shapes differ, or the sequence is no whole number of blocks.
        """
        length = query.shape[-2]
        key = key.transpose(-2, -1) if key.shape[-2] != length and key.shape[-1] == length else key
        if not query.shape == key.shape == value.shape or query.shape[1] != self.sparsity_config.num_heads:
            raise ValueError(
                f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} must have one "
                f"shape, (batch, {self.sparsity_config.num_heads} heads, tokens, size): this is self-attention"
            )
        biases = [
            rpe,
            None if key_padding_mask is None else self._padding(key_padding_mask, query),
            None if attn_mask is None else _as_bias(attn_mask.reshape(length, length), self.attn_mask_mode, query),
        ]
        given = [bias for bias in biases if bias is not None]
        if self.implementation == "flex" and not given:
            from torch.nn.attention.flex_attention import flex_attention

            return flex_attention(query, key, value, block_mask=self._mask(length, query.device, block_mask))
        mask = self._mask(length, query.device, token_mask)
        if given:
            added = sum(given[1:], given[0]).to(query.dtype)
            mask = torch.where(mask, added, torch.full((), -math.inf, dtype=query.dtype, device=query.device))
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    def _padding(self, mask: Tensor, query: Tensor) -> Tensor:
        rows = mask.reshape(len(query), 1, 1, query.shape[-2])
        return _as_bias(rows, self.key_padding_mask_mode, query)

    def _mask(self, length: int, device: torch.device, make: Callable[[Tensor, int], Any]) -> Any:
        """Return the mask for sequences of `length`, made once for the present layout."""
        layout, version = self._made_of
        if layout is not self.master_layout or version != layout._version:  # a state dict was loaded
            self._masks.clear()
            self._made_of = (self.master_layout, self.master_layout._version)
        place = (length, device, make.__name__)
        if place not in self._masks:
            self._masks[place] = make(self.get_layout(length).to(device), self.sparsity_config.block)
        return self._masks[place]


def _as_bias(mask: Tensor, mode: MaskMode, query: Tensor) -> Tensor:
    """Return what a mask adds to the scores."""
    if mode == "add":
        return mask.to(query.dtype)
    return torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(mask == 0, -math.inf)


class BertSparseSelfAttention(nn.Module):
    """Self-attention of BERT by `SparseSelfAttention`: three projections and the layout.

    config: of the model, with hidden_size and num_attention_heads.

    Raises ValueError if the heads do not divide the hidden size.
    """

    def __init__(self, config: Any, sparsity_config: SparsityConfig | None = None, **options: Any) -> None:
        super().__init__()
        if config.hidden_size % config.num_attention_heads:
            raise ValueError(
                f"num_attention_heads = {config.num_attention_heads} must divide hidden_size = {config.hidden_size}"
            )
        self.num_attention_heads = config.num_attention_heads
        self.attention_head_size = config.hidden_size // config.num_attention_heads
        self.all_head_size = config.hidden_size
        self.query, self.key, self.value = (nn.Linear(config.hidden_size, config.hidden_size) for _ in range(3))
        sparsity_config = sparsity_config or FixedSparsityConfig(num_heads=config.num_attention_heads)
        self.sparse_self_attention = SparseSelfAttention(sparsity_config, **options)

    def transpose_for_scores(self, x: Tensor) -> Tensor:
        """Return (batch, tokens, hidden) as (batch, heads, tokens, size)."""
        return x.view(*x.shape[:-1], self.num_attention_heads, self.attention_head_size).transpose(1, 2)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return (batch, tokens, hidden).  attention_mask: added to the scores, (batch, 1, 1, tokens)."""
        parts = [self.transpose_for_scores(each(hidden_states)) for each in (self.query, self.key, self.value)]
        context: Tensor = self.sparse_self_attention(*parts, key_padding_mask=attention_mask)
        return context.transpose(1, 2).flatten(2)
