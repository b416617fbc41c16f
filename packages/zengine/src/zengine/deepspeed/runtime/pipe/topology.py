"""`deepspeed.runtime.pipe.topology`."""

from __future__ import annotations

from zcomm import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology

__all__ = ["PipeDataParallelTopology", "PipeModelDataParallelTopology", "ProcessTopology"]
