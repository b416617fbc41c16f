"""Helpers for models with sparse attention: layers of BERT, whole blocks of tokens, longer position embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zengine.sparse_attention.attention import BertSparseSelfAttention
from zengine.sparse_attention.layouts import SparsityConfig

__all__ = ["SparseAttentionUtils"]


class _SelfAttentionOfLayer(BertSparseSelfAttention):
    """Sparse self-attention in a layer of Transformers, which passes masks of its own and takes (output, None)."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **others: Any) -> Any:
        """Return (batch, tokens, hidden), and None for the weights.

        attention_mask: (batch, 1, 1 or tokens, tokens) bool, or added to the scores; the same for every query.
        Raises ValueError for a cache or an encoder's states.
        """
        if given := [name for name in ("past_key_values", "encoder_hidden_states") if others.get(name) is not None]:
            raise ValueError(f"sparse self-attention of BERT takes no {given[0]}: it is for encoders")
        if attention_mask is not None:
            attention_mask = attention_mask[:, :, :1].expand(len(hidden_states), -1, -1, -1)
            if attention_mask.dtype == torch.bool:
                least = torch.finfo(hidden_states.dtype).min
                attention_mask = torch.zeros_like(attention_mask, dtype=hidden_states.dtype).masked_fill(
                    ~attention_mask, least
                )
        return super().forward(hidden_states, attention_mask), None


class SparseAttentionUtils:
    """DeepSpeed's class of that name."""

    @staticmethod
    def replace_model_self_attention_with_sparse_self_attention(
        model: nn.Module, max_position: int, sparsity_config: SparsityConfig | None = None
    ) -> nn.Module:
        """Replace the self-attentions of a BERT or RoBERTa of Transformers; their projections stay.  Return it.

        max_position: longest sequence in tokens; see `extend_position_embedding` for one that is longer than before.
        sparsity_config: None: FixedSparsityConfig.

        Raises ValueError for another model, or a decoder.
        """
        home: Any = getattr(model, "bert", getattr(model, "roberta", None))
        if home is None:
            raise ValueError(
                f"{type(model).__name__} has neither .bert nor .roberta; for other encoders call "
                "replace_self_attention_layer_with_sparse_self_attention_layer(config, layers, sparsity_config)"
            )
        config: Any = model.config
        config.max_position_embeddings = max_position + (2 if hasattr(model, "roberta") else 0)
        SparseAttentionUtils.replace_self_attention_layer_with_sparse_self_attention_layer(
            config, home.encoder.layer, sparsity_config
        )
        return model

    @staticmethod
    def replace_self_attention_layer_with_sparse_self_attention_layer(
        config: Any, layers: Any, sparsity_config: SparsityConfig | None = None
    ) -> Any:
        """Replace `attention.self` of each layer, which has `query`, `key` and `value`; return `layers`.

        config: of the model.  sparsity_config: None: FixedSparsityConfig.

        Raises ValueError for a decoder, whose later tokens are hidden.
        """
        if getattr(config, "is_decoder", False):
            raise ValueError("sparse self-attention of BERT is for encoders, and config.is_decoder is true")
        block = 16 if sparsity_config is None else sparsity_config.block
        longest = -(-config.max_position_embeddings // block) * block
        for layer in layers:
            made = _SelfAttentionOfLayer(config, sparsity_config, max_seq_length=longest)
            own = layer.attention.self
            made.query, made.key, made.value = own.query, own.key, own.value
            made.sparse_self_attention.to(own.query.weight.device)
            made.train(own.training)
            layer.attention.self = made
        return layers

    @staticmethod
    def pad_to_block_size(
        block_size: int,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        pad_token_id: int,
        model_embeddings: Any,
    ) -> tuple[int, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Pad (batch, tokens) inputs to whole blocks; return the number of added tokens, and the five tensors.

        Added tokens are `pad_token_id`, with a mask and a type of 0.  model_embeddings: function from token ids to
        `inputs_embeds`, (batch, tokens, hidden), if these are given.

        Raises ValueError if neither input_ids nor inputs_embeds are given.
        """
        whole = input_ids if input_ids is not None else inputs_embeds
        if whole is None:
            raise ValueError("pad_to_block_size() needs input_ids or inputs_embeds")
        added = -whole.shape[1] % block_size
        if not added:
            return 0, input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds

        def padded(tensor: Tensor | None, value: int) -> Tensor | None:
            return None if tensor is None else F.pad(tensor, (0, added), value=value)

        if inputs_embeds is not None:
            ids = torch.full((len(whole), added), pad_token_id, dtype=torch.long, device=whole.device)
            inputs_embeds = torch.cat([inputs_embeds, model_embeddings(ids)], dim=1)
        return (
            added,
            padded(input_ids, pad_token_id),
            padded(attention_mask, 0),
            padded(token_type_ids, 0),
            padded(position_ids, pad_token_id),
            inputs_embeds,
        )

    @staticmethod
    def unpad_sequence_output(pad_len: int, sequence_output: Tensor) -> Tensor:
        """Return (batch, tokens, ...) without the last `pad_len` tokens."""
        return sequence_output[:, : sequence_output.shape[1] - pad_len]

    @staticmethod
    def extend_position_embedding(model: nn.Module, max_position: int) -> nn.Module:
        """Repeat the position embeddings of a BERT or RoBERTa of Transformers until there are `max_position`.

        Raises ValueError for another model, or a length that is no multiple of the present one.
        """
        home: Any = getattr(model, "bert", getattr(model, "roberta", None))
        if home is None:
            raise ValueError(
                f"{type(model).__name__} has neither .bert nor .roberta, whose position embeddings repeat"
            )
        reserved = 2 if hasattr(model, "roberta") else 0  # rows before the first position
        table = home.embeddings.position_embeddings
        present = table.weight.shape[0] - reserved
        if max_position <= present or max_position % present:
            raise ValueError(f"max_position = {max_position} must be a multiple of the present {present} positions")
        first, rows = table.weight.data[:reserved], table.weight.data[reserved:]
        table.weight.data = torch.cat([first, rows.repeat(max_position // present, 1)])
        table.num_embeddings = max_position + reserved
        home.embeddings.register_buffer("position_ids", torch.arange(max_position + reserved)[None], persistent=False)
        if hasattr(home.embeddings, "token_type_ids"):
            types = torch.zeros(1, max_position + reserved, dtype=torch.long)
            home.embeddings.register_buffer("token_type_ids", types, persistent=False)
        config: Any = model.config
        config.max_position_embeddings = max_position + reserved
        return model

    @staticmethod
    def update_tokenizer_model_max_length(tokenizer: Any, max_position: int) -> Any:
        """Set the longest sequence of a tokenizer of Transformers; return it."""
        tokenizer.model_max_length = max_position
        tokenizer.init_kwargs["model_max_length"] = max_position
        return tokenizer
