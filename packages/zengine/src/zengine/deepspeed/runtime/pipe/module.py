"""`deepspeed.runtime.pipe.module`."""

from __future__ import annotations

from zpartition.pipeline import LayerSpec, PipelineError, PipelineModule, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineError", "PipelineModule", "TiedLayerSpec"]
