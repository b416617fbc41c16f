"""`deepspeed.runtime.pipe`."""

from __future__ import annotations

from zengine.deepspeed.runtime.pipe import engine, module, topology
from zengine.deepspeed.runtime.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec
from zengine.deepspeed.runtime.pipe.topology import ProcessTopology

__all__ = ["LayerSpec", "PipelineModule", "ProcessTopology", "TiedLayerSpec", "engine", "module", "topology"]
