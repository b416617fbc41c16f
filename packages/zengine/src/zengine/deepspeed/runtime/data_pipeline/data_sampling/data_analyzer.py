"""`deepspeed.runtime.data_pipeline.data_sampling.data_analyzer`; ours is `zengine.data.DataAnalyzer`."""

from __future__ import annotations

from zengine.deepspeed.absent import absent

__all__ = ["DataAnalyzer"]

DataAnalyzer = absent("runtime.data_pipeline.data_sampling.data_analyzer.DataAnalyzer")
