"""zoptim's OneBitAdam with the arguments of DeepSpeed's class."""

from __future__ import annotations

import zoptim
from zengine.deepspeed.runtime.fp16.onebit.standalone import DeepSpeedArguments

__all__ = ["OnebitAdam"]


class OnebitAdam(DeepSpeedArguments, zoptim.OneBitAdam):
    """1-bit Adam; `options` are those of zoptim.OneBitAdam, whose names and defaults are DeepSpeed's."""

    checkpoint_kind = "OneBitAdam"  # state format of that class

    @property
    def adam_freeze_key(self) -> bool:
        """Momenta are compressed: the warm-up is over."""
        return bool(self.param_groups[0]["frozen"])
