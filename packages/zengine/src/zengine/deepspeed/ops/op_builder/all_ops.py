"""`deepspeed.ops.op_builder.all_ops`: the builders by the names of their ops."""

from __future__ import annotations

from zengine.deepspeed.ops import op_builder
from zengine.deepspeed.ops.op_builder import OpBuilder

__all__ = ["ALL_OPS"]

_BUILDERS = [getattr(op_builder, name)() for name in op_builder.__all__ if name.endswith("Builder")]
ALL_OPS: dict[str, OpBuilder] = {each.name: each for each in _BUILDERS if each.name}
