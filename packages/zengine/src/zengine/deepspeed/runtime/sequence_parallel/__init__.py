"""`deepspeed.runtime.sequence_parallel`."""

from __future__ import annotations

from zengine.deepspeed.runtime.sequence_parallel import parallel_state_sp, ulysses_sp

__all__ = ["parallel_state_sp", "ulysses_sp"]
