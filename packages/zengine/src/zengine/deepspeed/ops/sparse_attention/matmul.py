"""`deepspeed.ops.sparse_attention.matmul`: not available, see `SparseSelfAttention`."""

from __future__ import annotations

from zengine.deepspeed.absent import absent

__all__ = ["MatMul"]

MatMul = absent("ops.sparse_attention.matmul.MatMul")
