"""Sparse attention: block layouts by DeepSpeed's patterns, and attention over them without kernels of our own."""

from typing import TYPE_CHECKING

from zengine.imports import homes_below, lazy_attributes

if TYPE_CHECKING:
    from zengine.sparse_attention.attention import (
        BertSparseSelfAttention,
        SparseSelfAttention,
        block_mask,
        token_mask,
    )
    from zengine.sparse_attention.layouts import (
        BigBirdSparsityConfig,
        BSLongformerSparsityConfig,
        DenseSparsityConfig,
        FixedSparsityConfig,
        LocalSlidingWindowSparsityConfig,
        SparsityConfig,
        VariableSparsityConfig,
    )
    from zengine.sparse_attention.section import make_sparsity_config
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
    "block_mask",
    "make_sparsity_config",
    "token_mask",
]

_HOME_OF = homes_below(
    "zengine",
    {
        "sparse_attention.attention": "BertSparseSelfAttention SparseSelfAttention block_mask token_mask",
        "sparse_attention.layouts": "BSLongformerSparsityConfig BigBirdSparsityConfig DenseSparsityConfig "
        "FixedSparsityConfig LocalSlidingWindowSparsityConfig SparsityConfig VariableSparsityConfig",
        "sparse_attention.section": "make_sparsity_config",
        "sparse_attention.utils": "SparseAttentionUtils",
    },
)

__getattr__, __dir__ = lazy_attributes(__name__, _HOME_OF)
