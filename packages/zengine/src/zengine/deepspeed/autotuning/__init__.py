"""`deepspeed.autotuning`: the scheduler of experiments; the search for a config is `zengine plan`'s."""

from __future__ import annotations

from zengine.deepspeed.autotuning.autotuner import Autotuner

__all__ = ["Autotuner"]
