"""Base classes of config classes."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from zengine.deepspeed.runtime import config_utils
from zengine.deepspeed.runtime.precision_config import (
    DeepSpeedFP16Config,
    get_bfloat16_config,
    get_float16_config,
)


def test_a_model_of_a_user_has_old_names_aliases_and_no_unknown_ones(caplog: pytest.LogCaptureFixture):
    """As DeepSpeed's own test of its base class does."""
    pydantic = pytest.importorskip("pydantic")
    old = {"deprecated": True, "new_param": "param_2", "new_param_fn": lambda value: [value]}
    base: Any = config_utils.DeepSpeedConfigModel
    names = {"param_1": int, "param_2_old": str | None, "param_2": list[str] | None, "param_3": int}
    body = {
        "__annotations__": names,
        "param_1": 0,
        "param_2_old": pydantic.Field(None, json_schema_extra=old),
        "param_2": None,
        "param_3": pydantic.Field(0, alias="param_3_alias"),
    }
    simple: Any = type(base)("SimpleConf", (base,), {**body, "__module__": __name__})
    assert simple(param_1=42).param_1 == 42
    assert simple(param_2_old="DS").param_2 == ["DS"]
    assert "param_2_old is deprecated use param_2 instead" in caplog.text
    assert (simple(param_3=10).param_3, simple(param_3_alias=10).param_3) == (10, 10)
    assert simple(param_1="auto").param_1 == 0
    for wrong in ({"param_1": "DS"}, {"param_2": "DS"}, {"param_1_typo": 0}):
        with pytest.raises(pydantic.ValidationError):
            simple(**wrong)
    with pytest.raises(ValueError, match="'param_2_old' and replacing parameter 'param_2' together"):
        simple(param_2_old="a", param_2=["b"])
    assert config_utils.get_config_default(simple, "param_1") == 0


def test_only_the_model_needs_pydantic(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pydantic", None)
    config_utils._config_model.cache_clear()
    assert get_bfloat16_config({"bfloat16": {"enabled": True}}).enabled
    with pytest.raises(ImportError):
        _ = config_utils.DeepSpeedConfigModel


def test_sections_of_the_precisions_check_their_values():
    found = get_float16_config({"fp16": {"enabled": True, "initial_scale_power": "auto", "loss_scale": 0}})
    assert (found.enabled, found.loss_scale, found.initial_dynamic_scale()) == (True, 0.0, 65536)
    assert found.dynamic_loss_scale_args()["scale_window"] == 1000
    assert found.model_fields_set == {"enabled", "loss_scale"}
    assert DeepSpeedFP16Config(loss_scale="128").loss_scale == 128.0
    wrongs: list[tuple[dict[str, Any], str]] = [
        ({"loss_scale": True}, "number, not bool"),
        ({"loss_scale": float("inf")}, "finite number"),
        ({"loss_scale": -1}, "must be >= 0"),
        ({"enabled": True, "min_loss_scale": 0}, "min_loss_scale must be > 0"),
        ({"hysteresis": 1.5}, "needs a whole number"),
        ({"enable": True}, "Did you mean"),
    ]
    for wrong, reason in wrongs:
        with pytest.raises(ValueError, match=reason):
            DeepSpeedFP16Config(**wrong)


def test_numbers_and_objects_print_as_in_deepspeed():
    """The text is that of DeepSpeed 0.19.8."""
    text = json.dumps(
        {"a": 50000, "b": {"c": [1, 2000.5, True]}, "d": "x"}, indent=4, cls=config_utils.ScientificNotationEncoder
    )
    assert (
        text
        == '{\n    "a": 5.000000e+04, \n    "b": {\n        "c": [1, 2.000500e+03, true]\n    }, \n    "d": "x"\n}'
    )
    assert (repr(config_utils.pp_int(1234567)), repr(config_utils.pp_int(3, "x"))) == ("1,234,567", "x")
    shown = config_utils.DeepSpeedConfigObject()
    shown.__dict__["key"] = 2
    assert (json.loads(repr(shown)), shown.repr()) == ({"key": 2}, {"key": 2})


def test_a_key_that_occurs_twice_is_rejected():
    hook = config_utils.dict_raise_error_on_duplicate_keys
    assert json.loads('{"a": 1, "b": {"a": 2}}', object_pairs_hook=hook) == {"a": 1, "b": {"a": 2}}
    with pytest.raises(ValueError, match=r"Duplicate keys in DeepSpeed config: \['a'\]"):
        json.loads('{"a": 1, "a": 2}', object_pairs_hook=hook)
