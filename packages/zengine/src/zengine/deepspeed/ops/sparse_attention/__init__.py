"""`deepspeed.ops.sparse_attention`."""

from __future__ import annotations

from zengine.deepspeed.ops.sparse_attention import sparse_self_attention, sparsity_config
from zengine.sparse_attention.attention import BertSparseSelfAttention, SparseSelfAttention
from zengine.sparse_attention.layouts import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
)
from zengine.sparse_attention.utils import SparseAttentionUtils

__all__ = [
    "BSLongformerSparsityConfig",
    "BertSparseSelfAttention",
    "BigBirdSparsityConfig",
    "DenseSparsityConfig",
    "FixedSparsityConfig",
    "LocalSlidingWindowSparsityConfig",
    "SparseAttentionUtils",
    "SparseSelfAttention",
    "SparsityConfig",
    "VariableSparsityConfig",
    "sparse_self_attention",
    "sparsity_config",
]
