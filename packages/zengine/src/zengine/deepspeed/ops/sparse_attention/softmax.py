"""`deepspeed.ops.sparse_attention.softmax`: not available, see `SparseSelfAttention`."""

from __future__ import annotations

from zengine.deepspeed.absent import absent

__all__ = ["Softmax"]

Softmax = absent("ops.sparse_attention.softmax.Softmax")
