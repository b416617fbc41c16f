"""`deepspeed.autotuning.config`: the section `autotuning` of a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from zengine.config.keys.autotuning import AUTOTUNING
from zengine.deepspeed.runtime.config_utils import DeepSpeedConfigObject
from zengine.deepspeed.section_model import SectionModel

__all__ = ["DeepSpeedAutotuningConfig"]


class _Autotuning(SectionModel):
    rows = AUTOTUNING
    defaults = {  # noqa: RUF012
        "min_train_batch_size": 1,
        "mp_size": 1,
    }
    title = "autotuning"


@final
class DeepSpeedAutotuningConfig(DeepSpeedConfigObject):
    """The section of a config (a dict), with DeepSpeed's defaults.  Raises as SectionModel does."""

    enabled: bool
    fast: bool
    results_dir: str
    exps_dir: str
    metric: str

    def __init__(self, param_dict: Mapping[str, Any]) -> None:
        vars(self).update(_Autotuning(**(param_dict.get("autotuning") or {})).model_dump())
