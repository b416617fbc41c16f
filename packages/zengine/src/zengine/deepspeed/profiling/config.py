"""`deepspeed.profiling.config`: the section `flops_profiler` of a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from zengine.config.grammar.table import section_of
from zengine.config.keys.telemetry import FlopsProfilerSection
from zengine.deepspeed.runtime.config_utils import DeepSpeedConfigObject
from zengine.deepspeed.section_model import SectionModel

__all__ = ["DeepSpeedFlopsProfilerConfig"]


class _FlopsProfiler(SectionModel):
    rows = section_of(FlopsProfilerSection)
    defaults = {"output_file": None}  # noqa: RUF012
    title = "flops_profiler"


@final
class DeepSpeedFlopsProfilerConfig(DeepSpeedConfigObject):
    """The section of a config (a dict), with DeepSpeed's defaults.  Raises as SectionModel does."""

    enabled: bool
    recompute_fwd_factor: float
    profile_step: int
    module_depth: int
    top_modules: int
    detailed: bool
    output_file: str | None

    def __init__(self, param_dict: Mapping[str, Any]) -> None:
        vars(self).update(_FlopsProfiler(**(param_dict.get("flops_profiler") or {})).model_dump())
