"""`deepspeed.launcher`: torchrun launches; `zengine run` wraps it."""

from __future__ import annotations

from zengine.deepspeed.launcher import runner

__all__ = ["runner"]
