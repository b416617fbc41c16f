"""zoptim's ZeroOneAdam with the arguments of DeepSpeed's class."""

from __future__ import annotations

import zoptim
from zengine.deepspeed.runtime.fp16.onebit.standalone import DeepSpeedArguments

__all__ = ["ZeroOneAdam"]


class ZeroOneAdam(DeepSpeedArguments, zoptim.ZeroOneAdam):
    """0/1 Adam; `options` are those of zoptim.ZeroOneAdam, whose names and defaults are DeepSpeed's."""

    checkpoint_kind = "ZeroOneAdam"  # state format of that class

    @property
    def freeze_key(self) -> bool:
        """Second moments are frozen."""
        return bool(self.param_groups[0]["frozen"])
