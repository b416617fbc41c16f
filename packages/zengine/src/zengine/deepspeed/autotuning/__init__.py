"""`deepspeed.autotuning`: not available; `zengine plan` predicts without experiments."""

from __future__ import annotations

from zengine.deepspeed.autotuning.autotuner import Autotuner

__all__ = ["Autotuner"]
