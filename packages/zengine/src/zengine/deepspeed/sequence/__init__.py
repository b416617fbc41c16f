"""`deepspeed.sequence`."""

from __future__ import annotations

from zengine.deepspeed.sequence import cross_entropy, layer

__all__ = ["cross_entropy", "layer"]
