"""`deepspeed.ops.sparse_attention.sparse_self_attention`."""

from zengine.sparse_attention.attention import SparseSelfAttention

__all__ = ["SparseSelfAttention"]
