"""`deepspeed.runtime.sequence_parallel`."""

from __future__ import annotations

from zengine.deepspeed.runtime.sequence_parallel import ulysses_sp

__all__ = ["ulysses_sp"]
