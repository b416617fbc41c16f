"""The table of a plan: every value, under the key that sets it, with its origin."""

from __future__ import annotations

from typing import Any

import pytest

from zengine.config import Facts, Plan, load, resolve

_PACKING = {"enabled": True, "dynamic_batching": {"enabled": True, "max_tokens": 64}}
_CURRICULUM = {
    "enabled": True,
    "min_difficulty": 8,
    "max_difficulty": 64,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 10},
}
_LTD = {
    "enabled": True,
    "total_layer_num": 4,
    "random_ltd_layer_id": [1, 2],
    "random_ltd_schedule": {"min_value": 16, "max_value": 64, "schedule_config": {"require_steps": 10}},
}
_DATA = {"enabled": True, "data_routing": {"enabled": True, "random_ltd": _LTD}}


def _technique(shared: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    return {"shared_parameters": {"enabled": True, **shared}, "different_groups": {"g": {"params": params}}}


EVERYTHING = {
    "curriculum_learning": _CURRICULUM,
    "data_efficiency": {**_DATA, "data_sampling": _PACKING},
    "train_batch_size": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
    "tensorboard": {"enabled": True},
    "csv_monitor": {"enabled": True},
    "jsonl_monitor": {"enabled": True},
    "wandb": {"enabled": True},
    "comet": {"enabled": True},
    "mlflow": {"enabled": True},
    "aim": {"enabled": True},
    "trackio": {"enabled": True},
    "comms_logger": {"enabled": True},
    "flops_profiler": {"enabled": True},
    "profiler": {"enabled": True},
    "progressive_layer_drop": {"enabled": True},
    "quantize_training": {
        "enabled": True,
        "fp16_mixed_quantize": {"enabled": True},
        "eigenvalue": {"enabled": True},
    },
    "autotuning": {"enabled": True},
    "compression_training": {
        **{
            name: _technique({}, {"dense_ratio": 0.5})
            for name in ("sparse_pruning", "row_pruning", "channel_pruning")
        },
        "head_pruning": _technique({"num_heads": 2}, {"dense_ratio": 0.5}),
        "weight_quantization": _technique(
            {"quantize_weight_in_forward": True, "fp16_mixed_quantize": {"enabled": True}},
            {"start_bits": 8, "target_bits": 4},
        ),
        "activation_quantization": _technique({}, {"bits": 8}),
        "layer_reduction": {"enabled": True, "module_name_prefix": "h", "teacher_layer": [0]},
        "distillation": {"enabled": True},
    },
    "elasticity": {
        "enabled": True,
        "max_train_batch_size": 64,
        "micro_batch_sizes": [4],
        "ignore_non_elastic_batch_info": True,
    },
}


def plan_of(**source: Any) -> Plan:
    return resolve(load(source), Facts(world_size=2, replicas=2, device_type="cuda"))


def test_every_origin_has_its_row_and_every_row_its_origin() -> None:
    sections: list[dict[str, Any]] = [{"fp16": {"enabled": True}}, {"bf16": {"enabled": True}}]
    sections += [{"amp": {"enabled": True}}, {"eigenvalue": {"enabled": True}, "quantize_training": {}}]
    zenflow = {"stage": 1, "offload_optimizer": {"device": "cpu"}, "zenflow": {}}
    sections += [{"amp": {"enabled": True}, "quantize_training": {}, "zero_optimization": zenflow}]
    sections += [{"torch_autocast": {"enabled": True, "dtype": "fp16"}, "fp8": {"enabled": True}}]
    others = {"hybrid_engine": {"enabled": True}}, {"diloco": {"sync_every": 50}}
    plans = [plan_of(**{**EVERYTHING, **section, **others[index % 2]}) for index, section in enumerate(sections)]
    shown = {key for plan in plans for key, _ in plan.rows()}
    free = {"optimizer.params", "scheduler.params"}  # shown option by option
    assert {key for plan in plans for key in plan.origins} == shown | free
    for plan in plans:
        keys = [key for key, _ in plan.rows()]
        assert len(keys) == len(set(keys))


def test_a_metric_of_a_curriculum_has_rows_of_its_own_and_a_section_that_is_off_has_one() -> None:
    metric = {name: value for name, value in _CURRICULUM.items() if name != "enabled"}
    sampling = {"enabled": True, "curriculum_learning": {"enabled": True, "curriculum_metrics": {"seqlen": metric}}}
    plan = plan_of(train_batch_size=8, data_efficiency={"enabled": True, "data_sampling": sampling})
    home = "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.seqlen"
    assert (plan[f"{home}.max_difficulty"], plan.origin(f"{home}.max_difficulty")) == (64, "dict")
    off = [key for key, _ in plan.rows() if key.startswith("data_efficiency.data_routing")]
    assert off == ["data_efficiency.data_routing.enabled"]


def test_no_row_shows_none_or_auto() -> None:
    plan = plan_of(train_batch_size=8, bf16={"enabled": "auto"})
    for key, value in plan.rows():
        assert value is not None, key
        assert value != "auto", key


def test_a_line_holds_key_value_and_origin() -> None:
    text = '{"train_batch_size": 64,\n"bfloat16": {"enabled": true},\n"zero_optimization": {"stage": 2}}'
    lines = resolve(load(text), Facts(world_size=4, replicas=4)).describe().splitlines()
    cells = {tuple(line.split()) for line in lines}
    assert ("train_batch_size", "64", "<json>:1") in cells
    assert ("train_micro_batch_size_per_gpu", "16", "derived") in cells
    assert ("gradient_accumulation_steps", "1", "default") in cells
    assert ("bf16.enabled", "true", "<json>:2") in cells
    assert ("communication_data_type", "bfloat16", "derived") in cells
    assert ("zero_optimization.stage", "2", "<json>:3") in cells
    assert ("steps_per_print", "never", "default") in cells
    assert 'note: <json>:2: "bfloat16" is an old name: read as "bf16"' in lines


def test_the_columns_are_aligned() -> None:
    lines = [line for line in plan_of(**EVERYTHING).describe().splitlines() if not line.startswith("note")]
    starts = {line.index(line.split()[-1], line.rindex("  ")) for line in lines}
    assert len(starts) == 1


def test_a_value_is_found_by_its_key_with_its_origin_and_a_typo_names_the_nearest() -> None:
    plan = plan_of(train_batch_size=8, zero_optimization={"stage": 2})
    assert plan["zero_optimization.stage"] == 2
    assert (plan.origin("zero_optimization.stage"), plan.origin("dump_state")) == ("dict", "default")
    assert str(plan) == plan.describe()
    with pytest.raises(KeyError, match=r"did you mean zero_optimization\.stage"):
        plan["zero_optimization.stag"]
