"""`deepspeed.autotuning`: the search for a config, and the scheduler of its experiments."""

from __future__ import annotations

from zengine.deepspeed.autotuning.autotuner import Autotuner

__all__ = ["Autotuner"]
