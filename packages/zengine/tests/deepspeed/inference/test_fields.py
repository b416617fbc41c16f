"""Every field of DeepSpeedInferenceConfig: honoured, translated, without effect and said, or rejected with why."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zengine.deepspeed as deepspeed
from zengine.deepspeed.inference.config import DeepSpeedInferenceConfig
from zengine.inference.quantized_modules import QuantizedLinear

NO_EFFECT, REJECTED = "has no effect", "rejected"

# DeepSpeed's fields, deprecated ones and aliases included: a value that is not its default, and the answer.  A tuple
# of words: found in the notice or the error.  None: honoured, with a test of its effect, here or in the file named.
FIELDS: dict[str, tuple[Any, Any]] = {
    "replace_with_kernel_inject": (True, None),  # tests/integrations/test_inference_generate.py
    "kernel_inject": (True, ("another name", "replace_with_kernel_inject")),
    "dtype": ("bf16", None),
    "tensor_parallel": (
        {"tp_size": 2, "tp_grain_size": 64, "mpu": None, "tp_group": None},
        None,
    ),  # test_splitting.py
    "tp": ({"tp_size": 2}, ("another name", "tensor_parallel")),
    "enable_cuda_graph": (True, None),  # test_graphs.py
    "use_triton": (True, (NO_EFFECT, "no Triton kernels")),
    "triton_autotune": (True, (NO_EFFECT, "no Triton kernels")),
    "zero": ({"stage": 3, "offload_param": {"device": "cpu"}}, None),  # test_streaming.py
    "triangular_masking": (False, (NO_EFFECT, "the mask that it has")),
    "tm": (False, ("another name", "triangular_masking")),
    "moe": ({"ep_size": 2, "moe_experts": [4], "type": "standard"}, None),  # test_splitting.py
    "keep_module_on_host": (True, None),
    "quant": ({"weight": {"num_bits": 4}}, None),  # test_quantization.py
    "checkpoint": ("here", None),  # test_files.py
    "base_dir": ("here", None),
    "set_empty_params": (True, (NO_EFFECT, "on the meta device gets memory")),
    "save_mp_checkpoint_path": ("here", (REJECTED, "writes quantized weights, and none are")),
    "checkpoint_config": ({"base_dir": "here"}, None),
    "ckpt_config": ({"base_dir": "here"}, ("another name", "checkpoint_config")),
    "return_tuple": (False, (NO_EFFECT, "modules return what they returned before")),
    "training_mp_size": (2, (NO_EFFECT, "any number of ranks")),
    "injection_policy": ({nn.Linear: ("out",)}, (NO_EFFECT, "no layers are split")),
    "injection_dict": ({nn.Linear: ("out",)}, ("another name", "injection_policy")),
    "injection_policy_tuple": (("out",), (NO_EFFECT, "internal")),
    "config": ({"hidden_size": 4}, (NO_EFFECT, "its own config")),
    "args": ({"hidden_size": 4}, ("another name", "config")),
    "max_out_tokens": (2048, None),  # test_engine.py, tests/integrations/test_inference_generate.py
    "max_tokens": (2048, ("another name", "max_out_tokens")),
    "min_out_tokens": (2, None),
    "min_tokens": (2, ("another name", "min_out_tokens")),
    "transposed_mode": (True, (NO_EFFECT, "repacked")),
    "replace_method": ("manual", (NO_EFFECT, "recognized")),
    "mp_size": (2, ("an old name", "tensor_parallel.tp_size")),
    "mpu": (object(), ("an old name", "tensor_parallel.mpu")),
    "ep_size": (2, ("an old name", "moe.ep_size")),
    "ep_group": (object(), ("an old name", "moe.ep_group")),
    "expert_group": (object(), ("an old name", "moe.ep_group")),
    "ep_mp_group": (object(), (REJECTED, "tensor ranks have whole experts")),
    "expert_mp_group": (object(), (REJECTED, "tensor ranks have whole experts")),
    "moe_experts": ([4], ("an old name", "moe.moe_experts")),
    "moe_type": ("residual", ("an old name", "moe.type")),
}
INNER: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "quant.activation.num_bits": ({"quant": {"activation": {"num_bits": 4}}}, (REJECTED, "8 or 16")),
    "quant.activation.q_type": (
        {"quant": {"activation": {"q_type": "asymmetric"}}},
        (REJECTED, "symmetric"),
    ),
    "quant.activation.enabled": ({"quant": {"activation": {"enabled": False}}}, (REJECTED, "symmetric")),
    "quant.activation.q_groups": ({"quant": {"activation": {"q_groups": 4}}}, (NO_EFFECT, "finer")),
    "quant.weight.num_bits": ({"quant": {"weight": {"num_bits": 3}}}, (REJECTED, "8 or 4")),
    "quant.weight.q_groups": ({"quant": {"weight": {"q_groups": 4}}}, (NO_EFFECT, "finer")),
    "quant.qkv.enabled": ({"quant": {"qkv": {"enabled": False}}}, (NO_EFFECT, "quantized like all others")),
    "moe.ep_mp_group": ({"moe": {"ep_mp_group": object()}}, (REJECTED, "whole experts")),
    "moe.num_experts": ({"moe": {"num_experts": 4}}, ("",)),  # honoured: both names are DeepSpeed's
}


def answer(given: dict[str, Any]) -> str:
    """The notices of a config, or its error."""
    try:
        return "\n".join(DeepSpeedInferenceConfig.of(given).notices)
    except ValueError as error:
        return f"{REJECTED}: {error}"


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_has_an_answer(field: str) -> None:
    value, wanted = FIELDS[field]
    found = answer({field: value})
    if wanted is None:
        assert found == ""
    else:
        assert all(word in found for word in wanted), found


@pytest.mark.parametrize("field", INNER)
def test_inner_fields_have_answers(field: str) -> None:
    given, wanted = INNER[field]
    found = answer(given)
    assert all(word in found for word in wanted), found


def test_defaults_say_nothing() -> None:
    assert answer({}) == ""
    assert answer(DeepSpeedInferenceConfig().model_dump()) == ""


def test_there_is_no_other_field() -> None:
    found = DeepSpeedInferenceConfig.rows.keys
    assert set(found) == set(FIELDS)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def test_names_are_read_once_from_files_and_keywords(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "inference.json"
    path.write_text(json.dumps({"dtype": "int8", "max_tokens": 7, "transposed_mode": True}))
    with caplog.at_level(logging.WARNING, "zengine"):
        engine = deepspeed.init_inference(Model(), str(path), min_tokens=2)
    assert isinstance(engine.up, QuantizedLinear)
    told = [record.getMessage() for record in caplog.records]
    assert [sum(name in line for line in told) for name in ("max_tokens", "transposed_mode", "min_tokens")] == [1] * 3
    with pytest.raises(ValueError, match="max_tokens is 7 in config and 8 as an argument"):
        deepspeed.init_inference(Model(), str(path), max_tokens=8)


def test_kernel_injection_and_a_policy_exclude_each_other() -> None:
    given = {"replace_with_kernel_inject": True, "injection_policy": {Model: ("down",)}}
    with pytest.raises(AssertionError, match=r"replace_with_kernel_inject and injection_policy.*Give one of them"):
        deepspeed.init_inference(Model(), given)


def test_a_module_on_its_host_is_quantized_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from zengine.deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(get_accelerator(), "device_name", lambda index=None: "meta")  # in the place of a GPU
    x = torch.randn(2, 32)
    engine = deepspeed.init_inference(Model(), dtype="int8", keep_module_on_host=True)
    assert engine(x).device.type == "cpu"
    moved = deepspeed.init_inference(Model(), dtype="int8")
    assert {each.weight.device.type for each in (moved.up, moved.down)} == {"meta"}
    assert moved.up.weight.nbytes < 64 * 32 * 1.1, "only codes and scales were moved"


@pytest.mark.parametrize(("dtype", "least"), [("fp32", 16_384), ("bf16", 8_192), ("int8", 4_096 * 1.0625)])
def test_too_little_memory_for_the_least_tokens_is_refused(
    dtype: str, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zengine.deepspeed.accelerator import get_accelerator

    with torch.device("meta"):
        model = Model()
        del model.up.bias, model.down.bias
        model.up.bias = model.down.bias = None
    model.config = type("Config", (), {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32})()
    itemsize = 2 if dtype == "bf16" else 4
    per_token = 2 * 2 * 32 * itemsize
    available = int(least) + 9 * per_token
    monkeypatch.setattr(get_accelerator(), "available_memory", lambda index=None: available)
    with pytest.raises(RuntimeError, match=r"min_out_tokens = 10 does not fit .*at most 9 tokens fit"):
        deepspeed.init_inference(model, dtype=dtype, min_out_tokens=10)
    with pytest.raises(ValueError, match="on the meta device and has no weights"):  # the next check
        deepspeed.init_inference(model, dtype=dtype, min_out_tokens=9)
    monkeypatch.setattr(get_accelerator(), "available_memory", lambda index=None: int(least) - 1)
    with pytest.raises(RuntimeError, match="the weights alone do not fit: quantize them"):
        deepspeed.init_inference(model, dtype=dtype)
