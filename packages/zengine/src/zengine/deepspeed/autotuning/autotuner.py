"""`deepspeed.autotuning.autotuner`: not available, see absent.py."""

from __future__ import annotations

from zengine.deepspeed.absent import absent

__all__ = ["Autotuner"]

Autotuner = absent("autotuning.Autotuner")
