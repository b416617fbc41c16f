"""`deepspeed.ops.sparse_attention.bert_sparse_self_attention`."""

from __future__ import annotations

from zengine.sparse_attention.attention import BertSparseSelfAttention

__all__ = ["BertSparseSelfAttention"]
