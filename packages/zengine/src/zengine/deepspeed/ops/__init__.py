"""`deepspeed.ops`: optimizers, sparse attention.  Nothing is compiled at run time; kernels come with the wheel."""

from __future__ import annotations

from zengine.deepspeed.ops import adagrad, adam, aio, lamb, lion, op_builder, sparse_attention
from zengine.deepspeed.ops.op_builder.all_ops import ALL_OPS
from zengine.deepspeed.ops.op_builder.builder import probe_is_compatible

__all__ = ["adagrad", "adam", "aio", "lamb", "lion", "op_builder", "sparse_attention"]

__compatible_ops__ = {name: probe_is_compatible(builder) for name, builder in ALL_OPS.items()}
