"""The section `zenflow` as DeepSpeed's class, alone and within DeepSpeedZeroConfig."""

from __future__ import annotations

import pytest

from zengine.deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig
from zengine.deepspeed.runtime.zero.config import DeepSpeedZeroConfig

# Made by DeepSpeed 0.19.8: ZenFlowConfig().model_dump(), and steps_per_epoch, which it hides
DEFAULTS = {
    "topk_ratio": 0.1,
    "select_strategy": "auto",
    "select_interval": "auto",
    "update_interval": "auto",
    "overlap_step": False,
    "offload": False,
    "auto_ratio": 0.99,
    "full_warm_up_rounds": 0,
    "pt_reserved_cores_perc": 0.5,
    "steps_per_epoch": None,
}


def test_defaults_are_those_of_deepspeed() -> None:
    assert ZenFlowConfig().model_dump() == DEFAULTS


def test_the_section_of_zero_is_such_an_object() -> None:
    assert DeepSpeedZeroConfig().zenflow is None
    given = {"topk_ratio": 0.25, "select_strategy": "step", "select_interval": 4, "update_interval": "auto"}
    found = DeepSpeedZeroConfig(stage=2, zenflow=given).zenflow
    assert isinstance(found, ZenFlowConfig)
    assert found.model_dump() == {**DEFAULTS, **given}


@pytest.mark.parametrize("wrong", [123, {"select_strategy": "never"}, {"topk": 0.1}])
def test_wrong_values_are_rejected(wrong: object) -> None:
    with pytest.raises(ValueError, match="zenflow"):
        DeepSpeedZeroConfig(zenflow=wrong)
