"""`deepspeed.runtime.pipe.dualpipev`: not available; the config's `pipeline.schedule` chooses among four."""

from __future__ import annotations

from zengine.deepspeed.absent import absent

__all__ = ["DualPipeVEngine", "DualPipeVModule"]

DualPipeVEngine = absent("runtime.pipe.dualpipev.DualPipeVEngine")
DualPipeVModule = absent("runtime.pipe.dualpipev.DualPipeVModule")
