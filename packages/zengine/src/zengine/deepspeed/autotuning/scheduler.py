"""`deepspeed.autotuning.scheduler`: not available, see absent.py."""

from __future__ import annotations

from zengine.deepspeed.absent import absent

__all__ = ["ResourceManager"]

ResourceManager = absent("autotuning.ResourceManager")
