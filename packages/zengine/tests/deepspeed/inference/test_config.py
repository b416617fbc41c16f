"""The inference config: honoured, without effect, or refused; each key by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from zengine.deepspeed.inference.config import (
    DeepSpeedInferenceConfig,
    DtypeEnum,
    default_inference_config,
    merge_config,
)
from zengine.deepspeed.inference.files import WeightFiles


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp16", torch.float16), ("bfloat", torch.bfloat16), (torch.float32, torch.float32), ("torch.half", None)],
)
def test_a_dtype_is_named_or_given(name, dtype):
    if dtype is None:
        with pytest.raises(ValueError, match=r'dtype = "torch\.half": must be float32, float16, bfloat16 or int8'):
            DeepSpeedInferenceConfig.of({"dtype": name})
    else:
        assert DeepSpeedInferenceConfig.of({"dtype": name}).dtype == dtype


def test_sections_that_are_off_are_accepted():
    assert DeepSpeedInferenceConfig.of({"zero": {"stage": 0}}) == DeepSpeedInferenceConfig.of({})
    assert DeepSpeedInferenceConfig.of({"quant": {"enabled": False}}).quantization is None


def test_keys_about_kernels_are_told_to_have_no_effect():
    made = DeepSpeedInferenceConfig.of({"replace_with_kernel_inject": True, "injection_policy": {}, "mp_size": 1})
    renamed, idle = made.notices
    assert 'mp_size" is an old name: read as "init_inference.tensor_parallel.tp_size"' in renamed
    assert idle.endswith("init_inference.injection_policy has no effect here: no layers are split")


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("mp_size", 0, "must be >= 1"),
        ("save_mp_checkpoint_path", "here", "writes quantized weights, and none are"),
        ("save_mp_checkpoint_path", 5, "must be a path"),
        ("checkpoint_config", {"checkpoint_dir": 5}, "must be the path of a weight file"),
        ("quant", {"weight": {"num_bits": 3}}, "must be 8 or 4"),
        ("quant", {"weight": {"post_init_quant": {"fc": 5}}}, "which is no object"),
        ("quant", {"weight": {"post_init_quant": {"fc": {"symmetric": "false"}}}}, "must be true or false"),
        ("quant", {"activation": {"num_bits": 4}}, "must be 8 or 16"),
        (
            "quant",
            {"activation": {"q_type": "asymmetric"}},
            "other than symmetric rounding of activations is not available yet",
        ),
        ("quant", {"weight": {"post_init_quant": {"fc": {"group_size": 48}}}}, "group_size 32, 64 or 128"),
        ("max_out_tokens", 0, "must be >= 1"),
        ("keep_module_on_host", "yes", "needs true or false"),
        ("dtype", "int4", 'for 4 bits, quant={"weight": {"num_bits": 4}}'),
        ("dtype", torch.uint8, "must be float32, float16, bfloat16 or int8"),
        ("dtype", torch.float64, r"must be float32, float16, bfloat16 or int8($|\n)"),
        ("max_out_token", 5, 'Did you mean "max_out_tokens"'),
        ("checkpoint", 5, "the path of a weight file"),
        ("min_out_tokens", 2000, "min_out_tokens = 2000 is more than max_out_tokens = 1024. Raise max_out_tokens"),
    ],
)
def test_what_is_not_there_is_refused_by_name(key, value, told):
    with pytest.raises(ValueError, match=f"{key}.*{told}"):
        DeepSpeedInferenceConfig.of({key: value})


def test_harmless_values_of_refused_keys_pass():
    defaults = {"enable_cuda_graph": False, "moe": {}, "ep_size": 1, "quant": None, "tensor_parallel": {"tp_size": 1}}
    assert DeepSpeedInferenceConfig.of(defaults) == DeepSpeedInferenceConfig()
    whole = default_inference_config()
    assert DeepSpeedInferenceConfig.of(whole).model_dump() == whole
    assert DeepSpeedInferenceConfig.of(whole).parallelism.is_single_rank


def test_deepspeed_s_fields_are_arguments_and_attributes():
    made = DeepSpeedInferenceConfig(dtype="half", tp={"tp_size": 2}, max_tokens=8, kernel_inject=True, moe=True)
    assert (made.dtype, made.max_out_tokens, made.replace_with_kernel_inject) == (torch.float16, 8, True)
    assert (made.tensor_parallel.tp_size, made.tensor_parallel.mpu, made.moe.ep_size) == (2, None, 1)
    assert (made.checkpoint, made.base_dir, made.quant.weight, made.replace_method) == (None, "", None, "auto")
    assert made.model_fields_set == {
        "dtype",
        "tensor_parallel",
        "max_out_tokens",
        "replace_with_kernel_inject",
        "moe",
    }
    made.max_out_tokens = 16
    assert made.max_out_tokens == 16
    with pytest.raises(ValueError, match="must be >= 1"):
        made.max_out_tokens = 0
    assert DtypeEnum.from_str("half") is DtypeEnum.fp16


def test_files_are_given_by_keys_of_their_own_or_by_a_section():
    section = {"checkpoint_dir": "a", "base_dir": "b", "save_mp_checkpoint_path": "c"}
    flat = {"checkpoint": Path("a"), "base_dir": "b", "save_mp_checkpoint_path": "c"}
    made = [
        DeepSpeedInferenceConfig.of({"dtype": "int8", **given})
        for given in (flat, {"checkpoint_config": section}, {"ckpt_config": section}, {"checkpoint": "a", **flat})
    ]
    assert {each.files for each in made} == {WeightFiles(checkpoint="a", base_dir="b", save_path="c")}
    with pytest.raises(ValueError, match=r"checkpoint is 'x', and checkpoint_config\.checkpoint_dir is 'a'"):
        DeepSpeedInferenceConfig.of({"dtype": "int8", "checkpoint": "x", "checkpoint_config": section})


def test_an_injection_policy_has_an_effect_where_layers_are_split():
    policy = {nn.Linear: ("out",)}
    assert not DeepSpeedInferenceConfig.of({"injection_policy": policy, "tensor_parallel": 2}).notices
    (notice,) = DeepSpeedInferenceConfig.of({"injection_policy": policy}).notices
    assert "injection_policy has no effect" in notice


def test_a_config_object_keeps_what_it_says_of_ranks():
    made = DeepSpeedInferenceConfig.of({"tensor_parallel": {"tp_size": 2}})
    assert DeepSpeedInferenceConfig.of(merge_config(made, {"dtype": torch.float16})).parallelism == made.parallelism
    with pytest.raises(ValueError, match="tp_size = 0: must be"):
        DeepSpeedInferenceConfig(tensor_parallel={"tp_size": 0})


def test_config_and_keywords_are_one_config(tmp_path: Path):
    (tmp_path / "inference.json").write_text(json.dumps({"max_out_tokens": 8}))
    for config in ({"max_out_tokens": 8}, str(tmp_path / "inference.json"), '{"max_out_tokens": 8}'):
        assert merge_config(config, {"dtype": "fp32"}) == {"max_out_tokens": 8, "dtype": "fp32"}
        assert merge_config(config, {"max_out_tokens": 8}) == {"max_out_tokens": 8}
        with pytest.raises(ValueError, match="max_out_tokens is 8 in config and 9 as an argument"):
            merge_config(config, {"max_out_tokens": 9})
    assert merge_config({"dtype": "half"}, {"dtype": torch.float16})["dtype"] is torch.float16
    assert merge_config(DeepSpeedInferenceConfig(max_out_tokens=8), {})["max_out_tokens"] == 8
    assert default_inference_config()["max_out_tokens"] == 1024
