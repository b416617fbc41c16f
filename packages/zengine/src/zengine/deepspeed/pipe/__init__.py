"""`deepspeed.pipe`."""

from __future__ import annotations

from zengine.deepspeed.later import absent

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]

PipelineModule = absent("pipe.PipelineModule")
LayerSpec = absent("pipe.LayerSpec")
TiedLayerSpec = absent("pipe.TiedLayerSpec")
