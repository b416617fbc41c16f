"""`deepspeed.ops.sparse_attention.sparse_attention_utils`."""

from __future__ import annotations

from zengine.sparse_attention.utils import SparseAttentionUtils

__all__ = ["SparseAttentionUtils"]
