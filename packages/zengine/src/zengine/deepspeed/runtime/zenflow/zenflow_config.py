"""`deepspeed.runtime.zenflow.zenflow_config`: the section `zero_optimization.zenflow` as DeepSpeed's class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, final

from zengine.config.grammar.table import section_of
from zengine.config.keys.zero import ZenFlow
from zengine.deepspeed.section_model import SectionModel

__all__ = ["ZenFlowConfig"]


@final
class ZenFlowConfig(SectionModel):
    """Section `zero_optimization.zenflow`; intervals that are not given are "auto"."""

    rows = section_of(ZenFlow)
    defaults: ClassVar[Mapping[str, Any]] = {
        "select_interval": "auto",
        "update_interval": "auto",
        "steps_per_epoch": None,
    }
    title = "zenflow"
    topk_ratio: float
    select_strategy: str
    select_interval: int | str
    update_interval: int | str
