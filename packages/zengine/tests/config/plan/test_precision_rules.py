"""Rules between the keys of precision, each broken alone; the other rules are in test_rules.py."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from zengine.config import ConfigError, Facts, Plan, Problem, load, resolve, violations
from zengine.config.plan.precision_rules import PRECISION_RULES
from zengine.config.plan.rules import RULES
from zprecision import Unscaled

ON = {"enabled": True}
BREAKING: dict[str, tuple[dict[str, Any], str]] = {
    "check_one_half_precision": (
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        "fp16.enabled and bf16.enabled are both on. Keep one of them.",
    ),
    "check_grad_accum_dtype": (
        {"data_types": {"grad_accum_dtype": "bf16"}, "bf16": {"enabled": "auto"}},
        "data_types.grad_accum_dtype = bfloat16 cannot hold gradients in bfloat16 or float32 exactly. "
        'Use "fp32", or leave it out.',
    ),
    "check_amp": (
        {"amp": ON, "fp16": ON},
        "amp.enabled and fp16.enabled are on: amp would be read as torch_autocast in fp16. Remove the amp section.",
    ),
    "check_autocast_weights": (
        {"torch_autocast": ON, "data_types": {"param_dtype": "fp64"}},
        "torch_autocast.enabled is incompatible with weights in float64 (data_types.param_dtype): autocast "
        "does not cast operations on float64. Remove one of the two.",
    ),
    "check_param_dtype": (
        {"data_types": {"param_dtype": "fp32"}, "bf16": ON},
        "data_types.param_dtype = float32 and bf16.enabled both set the dtype of weights. Leave param_dtype out.",
    ),
    "check_bf16_states": (
        {"bf16": {"enabled": True, "bf16_optimizer_states": True}},
        "bf16.bf16_optimizer_states needs bf16.bf16_master_weights_and_grads. Set that to true as well; for float32 "
        'masters with bf16 states add "state_dtype": "bf16" to optimizer.params.',
    ),
    "check_state_dtype": (
        {
            "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
            "optimizer": {"type": "AdamW", "params": {"state_dtype": "8bit"}},
        },
        'bf16.bf16_optimizer_states sets bf16 states, but optimizer.params.state_dtype = "8bit". Keep one of them.',
    ),
    "check_fp16_accumulation": (
        {
            "fp16": {"enabled": True, "fp16_master_weights_and_grads": True},
            "data_types": {"grad_accum_dtype": "fp32"},
        },
        "data_types.grad_accum_dtype = float32 and fp16.fp16_master_weights_and_grads both set the dtype of "
        "gradients: the optimizer gets them in float16, and their overflow would not be detected. "
        "Leave grad_accum_dtype out.",
    ),
    "check_fp16_states": (
        {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}, "optimizer": {"type": "NAdam"}},
        "fp16.fp16_master_weights_and_grads does not work with NAdam, which keeps its states in the dtype of the "
        "masters: second moments in float16 underflow to 0. Use Adam, AdamW, Lion, SGD, Adagrad, Lamb or Muon, whose "
        "states stay float32, or leave the key out.",
    ),
}


@pytest.mark.parametrize("rule", PRECISION_RULES, ids=lambda rule: rule.__name__)
def test_each_rule_reports_its_violation_and_no_other_rule_does(rule: Any) -> None:
    source, text = BREAKING[rule.__name__]
    assert rule in RULES
    assert [str(problem) for problem in violations(load(source))] == [text]
    assert rule(load({})) is None


LOW = {"enabled": True, "bf16_master_weights_and_grads": True}


@pytest.mark.parametrize(
    "source",
    [
        {"bf16": ON, "torch_autocast": ON},
        {"bf16": {"enabled": "auto"}, "torch_autocast": ON},
        {"bf16": ON, "torch_autocast": {**ON, "dtype": "fp16"}},
        {"fp16": ON, "torch_autocast": ON},
        {"fp16": ON, "torch_autocast": {**ON, "dtype": "bf16"}},
        {"amp": {**ON, "opt_level": "O0"}, "torch_autocast": ON, "fp16": ON},
        {"torch_autocast": ON, "data_types": {"param_dtype": "fp16"}},
        {"bf16": ON, "data_types": {"param_dtype": "bf16"}},
        {"data_types": {"param_dtype": "bf16"}, "torch_autocast": ON},
        {"data_types": {"param_dtype": "fp16"}},
        {"amp": {"enabled": True, "opt_level": "O3"}},
        {"amp": {"enabled": True, "opt_level": "O0"}, "bf16": ON},
        {"bf16": {**LOW, "bf16_optimizer_states": True}, "optimizer": {"type": "Lion"}},
        {"bf16": {**LOW, "bf16_optimizer_states": True},
         "optimizer": {"type": "Adam", "params": {"fp32_optimizer_states": False}}},
        {"bf16": {**LOW}, "data_types": {"grad_accum_dtype": "bf16"}},
        {"bf16": {"enabled": False, "bf16_optimizer_states": True}},
        {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}, "zero_optimization": {"stage": 0}},
    ],
)  # fmt: skip
def test_what_only_looks_like_a_conflict_passes(source: dict[str, Any]) -> None:
    assert violations(load(source)) == []


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ({"amp": ON, "data_types": {"param_dtype": "bf16"}}, "amp.enabled is incompatible with weights in bfloat16"),
        ({"data_types": {"param_dtype": "bf16"}, "bf16": {"enabled": "auto"}}, 'bf16.enabled = "auto" both set'),
        ({"bf16": {**LOW, "bf16_optimizer_states": True},
          "optimizer": {"type": "Adam", "params": {"fp32_optimizer_states": True}}},
         "optimizer.params.fp32_optimizer_states = true. Keep one"),
    ],
)  # fmt: skip
def test_the_reason_names_what_is_given(source: dict[str, Any], text: str) -> None:
    (problem,) = violations(load(source))
    assert text in str(problem)


def test_8_bit_products_are_refused_on_a_cpu_before_anything_starts() -> None:
    config = load({"train_batch_size": 1, "fp8": ON})
    with pytest.raises(ConfigError) as caught:
        resolve(config, Facts(world_size=1, replicas=1, device_type="cpu"))
    assert str(caught.value.problems[0]) == (
        "fp8.enabled = true: this run computes on the CPU, which has no 8-bit matrix products. "
        "Run on an NVIDIA GPU from Ada on (capability 8.9), or set it to false."
    )
    plan = resolve(config, Facts(world_size=1, replicas=1, device_type="cuda"))
    assert (plan.numerics.float8.modules, plan.numerics.float8.exclude) == (("*",), ("lm_head",))


def outcome(source: dict[str, Any], facts: Facts) -> tuple[Plan | None, tuple[Problem, ...]]:
    try:
        return resolve(load(source), facts), ()
    except ConfigError as error:
        return None, tuple(error.problems)


def test_any_combination_resolves_or_is_refused_in_words() -> None:
    """Sections drawn at random; nothing but a ConfigError may come out, and what resolves keeps the invariants."""
    draw = random.Random(7)

    def section(**choices: list[Any]) -> dict[str, Any]:
        return {key: draw.choice(values) for key, values in choices.items()}

    switch, dtypes, counts = [True, False, False], [None, None, "fp32", "bf16", "fp16", "fp64"], [0, 0]
    for _ in range(250):
        source: dict[str, Any] = {
            "train_batch_size": 2,
            "fp16": section(enabled=switch, loss_scale=[0, 8], fp16_master_weights_and_grads=switch),
            "bf16": section(
                enabled=[*switch, "auto"], bf16_master_weights_and_grads=switch, bf16_optimizer_states=switch
            ),
            "torch_autocast": section(enabled=switch, dtype=["bf16", "fp16", None]),
            "amp": section(enabled=switch, opt_level=["O0", "O1", "O3"]),
            "data_types": section(
                param_dtype=dtypes, grad_accum_dtype=dtypes, keep_in_fp32_modules=["auto", ["norm"]]
            ),
            "optimizer": {"type": draw.choice(["AdamW", "NAdam"])},
            "zero_optimization": section(stage=[0, 3]),
        }
        facts = Facts(world_size=2, replicas=2, bf16_is_faster=draw.choice([True, False]))
        plan, problems = outcome(source, facts)
        assert all(problem.reason and problem.suggestion for problem in problems)
        counts[plan is None] += 1
        if plan is None:
            continue
        narrow = {plan.precision.param, plan.numerics.autocast} - {torch.float32, torch.float64, None}
        assert plan.precision.param != torch.float64 or not narrow, source
        assert (torch.float16 in narrow) == (not isinstance(plan.scaling, Unscaled)), source
        assert plan.describe()
    assert min(counts) > 10
