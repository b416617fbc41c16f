"""`load` as a person meets it: golden reports, every problem of a file at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zengine.config import ConfigError, load

FAULTY = """{
  "train_micro_batch_size_per_gpu": 0,
  "gradient_cliping": 1.0,
  "zero_optimization": {
    "stage": "2",
    "reduce_bucketsize": 5e8,
    "legacy_stage1": true,
  },
  "bf16": {"enabled": "false"}, // why not
  "stage": 2,
  "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "weight_deacy": 0.1}},
  "fp16": {"enabled": false, "loss_scale": "auto", "min_loss_scale": -1},
  "weight_quantization": {"bits": 4},
  "autotuning": {"enabled": false, "fats": true},
  "steps_per_print": 10,
  "steps_per_print": 20
}
"""

REPORT = """config.json: 11 problems
  config.json:2:3  train_micro_batch_size_per_gpu = 0: must be >= 1
  config.json:3:3  gradient_cliping = 1.0: unknown key. Did you mean "gradient_clipping"?
  config.json:5:5  zero_optimization.stage = "2": needs 0, 1, 2 or 3, got text. Write 2 without quotes.
  config.json:6:5  zero_optimization.reduce_bucketsize = 500000000.0: unknown key. Did you mean "reduce_bucket_size"?
  config.json:9:12  bf16.enabled = "false": needs true, false or "auto", got text. Write false without quotes.
  config.json:10:3  stage = 2: unknown key. "stage" belongs under "zero_optimization".
  config.json:11:58  optimizer.params.weight_deacy = 0.1: AdamW has no option 'weight_deacy'. Did you mean \
'weight_decay'?"""


def problems(source: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(source)
    return [str(problem) for problem in caught.value.problems]


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(FAULTY)
    return "config.json"


def test_one_error_holds_every_problem_of_a_file(faulty: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(faulty)
    assert str(caught.value).startswith(REPORT)
    assert [str(problem) for problem in caught.value.problems[-4:]] == [
        "config.json:12:52  fp16.min_loss_scale = -1: must be >= 0",
        "config.json:13:27  weight_quantization.bits = 4: unknown key. Known keys here: post_init_quant, "
        "quantized_initialization.",
        'config.json:14:36  autotuning.fats = true: unknown key. Did you mean "fast"?',
        "config.json:16:3  steps_per_print: given twice, on lines 15 and 16. Keep one of them.",
    ]


def test_three_misspelt_keys_give_three_errors_with_the_right_names() -> None:
    assert problems({"gradient_acumulation_steps": 2, "gradient_cliping": 1.0, "bf16": {"enabeld": True}}) == [
        'gradient_acumulation_steps = 2: unknown key. Did you mean "gradient_accumulation_steps"?',
        'gradient_cliping = 1.0: unknown key. Did you mean "gradient_clipping"?',
        'bf16.enabeld = true: unknown key. Did you mean "enabled"?',
    ]


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ({"zero_optimization": {"stage": 7}}, "zero_optimization.stage = 7: must be 0, 1, 2 or 3"),
        ({"gradient_clipping": -1.0}, "gradient_clipping = -1.0: must be >= 0"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps = 0: must be >= 1"),
        ({"train_batch_size": True}, "train_batch_size = true: needs a whole number >= 1, got true/false"),
        ({"zero_optimization": {"offload_optimizer": {"device": "disk"}}},
         'zero_optimization.offload_optimizer.device = "disk": must be "none", "cpu" or "nvme"'),
        ({"zero_optimization": {"offload_param": {"device": "gpu"}}},
         'zero_optimization.offload_param.device = "gpu": must be "none", "cpu" or "nvme"'),
        ({"amp": {"enabled": True, "opt_level": "O4"}},
         'amp.opt_level = "O4": must be one of "O0", "O1", "O2", "O3"'),
        ({"torch_autocast": {"enabled": True, "dtype": "fp32"}},
         'torch_autocast.dtype = "fp32": must be "bf16" or "fp16". To train in float32, leave the section out.'),
        ({"zero": {"stage": 2}}, 'zero = {"stage": 2}: a key of the inference config, which '
         'is an argument of deepspeed.init_inference(). For training write "zero_optimization".'),
        ({"tensorboard": True},
         'tensorboard = true: needs an object {...}, got true/false. Write {"enabled": true}.'),
        ({"optimizer": "AdamW"}, 'optimizer = "AdamW": needs an object {...}, got text. Write {"type": "AdamW"}.'),
        ({"train_batch_size": 1e308}, "train_batch_size = 1e+308: must be <= 9223372036854775807"),
        ({"gradient_clipping": 10**400}, "gradient_clipping = Infinity: must be finite"),
        ({"train_batch_size": 10**5000}, "train_batch_size = Infinity: needs a whole number >= 1"),
        ('{"fp16": {"loss_scale": 1' + "0" * 390 + "}}",
         "<json>:1:11  fp16.loss_scale = 100000000000000000000000000000000000000000000...: must be finite"),
    ],
)  # fmt: skip
def test_a_refusal_says_what_was_given_why_not_and_what_to_do(source: dict[str, Any], problem: str) -> None:
    assert problems(source) == [problem]


def test_text_that_is_not_json_is_one_problem() -> None:
    assert problems("{") == ["<json>:1:2: expected a key in double quotes, found the end of the text"]
    assert problems('{"a": oops}') == ["<json>:1:7: expected a value, found oops"]


def test_a_file_with_a_list_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"a\.json: needs an object \{\.\.\.\}, got a list"):
        load(tmp_path / "a.json")


def test_an_error_about_a_dict_names_the_keys_alone() -> None:
    with pytest.raises(ConfigError) as caught:
        load({"gradient_cliping": 1.0})
    assert str(caught.value) == (
        'the config dict: 1 problem\n  gradient_cliping = 1.0: unknown key. Did you mean "gradient_clipping"?'
    )


def test_origins_tell_lines_from_defaults() -> None:
    config = load('{"train_batch_size": 8,\n"bf16": {"enabled": true}}')
    assert config.origin("train_batch_size") == "<json>:1"
    assert config.origin("bf16.enabled") == "<json>:2"
    assert config.origin("gradient_clipping") == "default"
    assert load({"train_batch_size": 8}).origin("train_batch_size") == "dict"


def test_an_empty_config_is_all_defaults() -> None:
    config = load({"config_version": "zengine-0.2"})
    assert (set(config.given), config.notices) == ({"config_version"}, ())
    assert config.settings.gradient_clipping == 1.0


def test_an_open_option_does_not_hide_the_slips_beside_it() -> None:
    params = {"total_num_steps": "auto", "warmup_num_stepz": 5}
    with pytest.raises(ConfigError) as caught:
        load({"optimizer": {"type": "AdamX"}, "scheduler": {"type": "WarmupDecayLR", "params": params}})
    assert [problem.key for problem in caught.value.problems] == [
        "scheduler.params.total_num_steps",
        "optimizer.type",
        "scheduler.params.warmup_num_stepz",
    ]
