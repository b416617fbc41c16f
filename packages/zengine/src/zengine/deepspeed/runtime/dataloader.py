"""`deepspeed.runtime.dataloader`."""

from __future__ import annotations

from zengine.data import RepeatingLoader

__all__ = ["RepeatingLoader"]
