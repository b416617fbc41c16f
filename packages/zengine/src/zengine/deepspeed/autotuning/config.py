"""`deepspeed.autotuning.config`: the section `autotuning` of a config, which has no effect here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from zengine.config.keys.absent import AUTOTUNING
from zengine.deepspeed.runtime.config_utils import DeepSpeedConfigObject
from zengine.deepspeed.section_model import SectionModel

__all__ = ["DeepSpeedAutotuningConfig"]


class _Autotuning(SectionModel):
    rows = AUTOTUNING
    defaults = {  # noqa: RUF012
        **dict.fromkeys(("fast", "overwrite"), True),
        "results_dir": "autotuning_results",
        "exps_dir": "autotuning_exps",
        "start_profile_step": 3,
        "end_profile_step": 5,
        "metric": "throughput",
        "tuner_type": "gridsearch",
        "tuner_early_stopping": 5,
        "tuner_num_trials": 50,
        "min_train_batch_size": 1,
        "max_train_micro_batch_size_per_gpu": 1024,
        "min_train_micro_batch_size_per_gpu": 1,
        "num_tuning_micro_batch_sizes": 3,
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
