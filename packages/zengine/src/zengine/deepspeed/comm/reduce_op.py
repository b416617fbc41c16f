"""`deepspeed.comm.reduce_op`: torch's operations, which have DeepSpeed's names."""

from __future__ import annotations

from torch.distributed import ReduceOp

__all__ = ["ReduceOp"]
