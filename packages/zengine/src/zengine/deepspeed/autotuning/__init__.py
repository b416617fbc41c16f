"""`deepspeed.autotuning`: not available; `zengine plan` predicts without experiments."""

from __future__ import annotations

from zengine.deepspeed.absent import absent

__all__ = ["Autotuner"]

Autotuner = absent("autotuning.Autotuner")
