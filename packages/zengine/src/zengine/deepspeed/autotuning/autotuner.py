"""`deepspeed.autotuning.autotuner`: not available; `zengine plan` predicts without experiments."""

from __future__ import annotations

from zengine.deepspeed.absent import absent
from zengine.deepspeed.autotuning.scheduler import ResourceManager

__all__ = ["Autotuner", "ResourceManager"]

Autotuner = absent("autotuning.Autotuner")
