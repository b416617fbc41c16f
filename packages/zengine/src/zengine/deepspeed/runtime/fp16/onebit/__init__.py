"""`deepspeed.runtime.fp16.onebit`: optimizers with compressed communication."""

from __future__ import annotations

from zengine.deepspeed.runtime.fp16.onebit.adam import OnebitAdam
from zengine.deepspeed.runtime.fp16.onebit.lamb import OnebitLamb
from zengine.deepspeed.runtime.fp16.onebit.zoadam import ZeroOneAdam

__all__ = ["OnebitAdam", "OnebitLamb", "ZeroOneAdam"]
