"""`deepspeed.runtime.pipe.engine`."""

from __future__ import annotations

from zengine.pipeline_engine import PipelineEngine

__all__ = ["PipelineEngine"]
