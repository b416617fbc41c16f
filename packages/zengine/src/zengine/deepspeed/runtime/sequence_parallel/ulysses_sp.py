"""`deepspeed.runtime.sequence_parallel.ulysses_sp`."""

from __future__ import annotations

from zengine.deepspeed.later import absent

__all__ = ["UlyssesSPAttentionHF", "UlyssesSPDataLoaderAdapter"]

UlyssesSPAttentionHF = absent("runtime.sequence_parallel.ulysses_sp.UlyssesSPAttentionHF")
UlyssesSPDataLoaderAdapter = absent("runtime.sequence_parallel.ulysses_sp.UlyssesSPDataLoaderAdapter")
