"""zoptim's OneBitLamb with the arguments of DeepSpeed's class."""

from __future__ import annotations

import zoptim
from zengine.deepspeed.runtime.fp16.onebit.standalone import DeepSpeedArguments

__all__ = ["OnebitLamb"]


class OnebitLamb(DeepSpeedArguments, zoptim.OneBitLamb):
    """1-bit LAMB; `options` are those of zoptim.OneBitLamb, whose names and defaults are DeepSpeed's."""

    checkpoint_kind = "OneBitLamb"  # state format of that class

    @property
    def lamb_freeze_key(self) -> bool:
        """Momenta are compressed: the warm-up is over."""
        return bool(self.param_groups[0]["frozen"])
