"""`deepspeed.pipe`."""

from __future__ import annotations

from zengine.deepspeed.runtime.pipe import LayerSpec, PipelineModule, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
