"""What each kind of key does: acts, is limited, has no effect, is renamed; and what a switch changes."""

from __future__ import annotations

from typing import Any

import pytest

from zengine.config.grammar.source import read
from zengine.config.reading.structure import Reading, structure


def reading(source: Any) -> Reading:
    return structure(read(source))


def problems(source: Any) -> list[str]:
    return [str(problem) for problem in reading(source).problems]


@pytest.mark.parametrize(
    "source",
    [
        {"autotuning": {"enabled": False}},
        {"flops_profiler": {}},
        {"zero_optimization": {"offload_optimizer": {"device": "none"}, "offload_param": {"device": None}}},
        {"scheduler": None, "zero_optimization": {"zenflow": None}},
        {"pipeline": {"stages": "auto"}},
        {"zero_optimization": {"zenflow": {"update_interval": "auto", "select_interval": "auto"}}},
        {"compile": {"deepcompile": False}},
        {"fp16": {"enabled": False}},
        {"zero_optimization": {"contiguous_gradients": True, "reduce_scatter": True, "round_robin_gradients": False}},
        {"tensor_parallel": {"autotp_size": 1, "tp": {"tp_size": 1}}, "sequence_parallel_size": 1},
    ],
)
def test_what_says_how_it_is_anyway_is_accepted_without_a_word(source: dict[str, Any]) -> None:
    assert reading(source).problems == ()
    assert reading(source).notices == ()


@pytest.mark.parametrize(
    ("source", "notice"),
    [
        ({"zero_optimization": {"parameter_alignment": True}},
         "dict: zero_optimization.parameter_alignment has no effect here: the layout sets the padding"),
        ({"zero_optimization": {"reduce_scatter": False}},
         "dict: zero_optimization.reduce_scatter has no effect here: sharded gradients are always reduce-scattered"),
        ({"autotuning": {"enabled": False, "fast": True}},
         "dict: autotuning.fast has no effect here: the section is switched off"),
        ({"zero_optimization": {"offload_param": {"device": "none", "pin_memory": True}}},
         "dict: zero_optimization.offload_param.pin_memory has no effect here: the section is switched off"),
        ({"fp16": {"loss_scale": 0}}, "dict: fp16.loss_scale has no effect here: the section is switched off"),
        ({"autotuning": {"enabled": True, "num_gpus": 2}},
         "dict: autotuning.num_gpus has no effect here: the launcher's --num_gpus decides"),
        ({"zero_optimization": {"stage3_max_live_parameters": "auto", "offload_param": {"buffer_size": "auto"}}},
         "dict: zero_optimization.stage3_max_live_parameters, zero_optimization.offload_param.buffer_size have no "
         'effect here: it is "auto", so its default applies'),
        ({"zero_optimization.reduce_bucket_size": 1, "zero_optimization.stage3_prefetch_bucket_size": 0.9},
         "dict: zero_optimization.reduce_bucket_size, zero_optimization.stage3_prefetch_bucket_size have no effect "
         "here: DeepSpeed reads no dotted names; write the key inside its section"),
        ({"zero_optimization": {"max_live_parameters": 8}},
         'dict: "zero_optimization.max_live_parameters" is another name: read as '
         '"zero_optimization.stage3_max_live_parameters"'),
        ({"zero_allow_untested_optimizer": 0},
         "dict: zero_allow_untested_optimizer has no effect here: every torch optimizer is accepted; if "
         "false, deepspeed.initialize() rejects those that DeepSpeed does not know"),
        ({"amp": {"enabled": False, "opt_level": "O1"}},
         "dict: amp.opt_level has no effect here: the section is switched off"),
        ({"aio": {"thread_count": 4}}, 'dict: "aio.thread_count" is an old name: read as "aio.intra_op_parallelism"'),
        ({"zero_optimization": True}, 'dict: "zero_optimization": true is read as {"stage": 1}'),
        ({"bfloat16": {"enabled": True}}, 'dict: "bfloat16" is an old name: read as "bf16"'),
        ({"zero_optimization": {"cpu_offload": False}},
         'dict: "zero_optimization.cpu_offload" is an old name: read as '
         '"zero_optimization.offload_optimizer.device" = "none"'),
        ({"checkpoint": {"load_universal": True}},
         "dict: checkpoint.load_universal has no effect here: every checkpoint loads at any world size"),
    ],
)  # fmt: skip
def test_an_accepted_key_without_effect_is_said_once(source: dict[str, Any], notice: str) -> None:
    assert reading(source).problems == ()
    assert reading(source).notices[0] == notice


def test_each_section_has_a_notice_of_its_own() -> None:
    source = '{"autotuning": {"fast": true},\n"comet": {"mode": "get", "online": true}}'
    assert reading(source).notices == (
        "<json>:1: autotuning.fast has no effect here: the section is switched off",
        "<json>:2: comet.mode, comet.online have no effect here: the section is switched off",
    )


def test_a_notice_names_the_line() -> None:
    assert reading('{"vocabulary_size":\n 8}').notices == (
        "<json>:1: vocabulary_size has no effect here: it only asks for advice on padding",
    )


_BALANCE = (
    "expert_parallel.load_balance_coeff = 0.1: a balancing bias in another library's router is not available yet. "
    "Leave it out, or call layer.gate.balance_by_bias(rate) on MoE layers."
)


def test_a_limited_key_is_refused_at_other_values() -> None:
    assert problems({"expert_parallel": {"enabled": True, "load_balance_coeff": 0.1}}) == [_BALANCE]
    assert problems({"pipeline": {"stages": "two"}}) == [
        'pipeline.stages = "two": needs a whole number >= 0 or "auto", got text'
    ]


def test_a_section_that_is_refused_is_still_checked_for_slips() -> None:
    assert problems({"expert_parallel": {"enabled": True, "load_balance_coeff": 0.1, "autoep_siz": 2}}) == [
        _BALANCE,
        'expert_parallel.autoep_siz = 2: unknown key. Did you mean "autoep_size"?',
    ]


def test_a_switch_inside_a_section_that_is_off_does_not_matter() -> None:
    inner = {"enabled": True, "metrics_path": "x"}
    source = {"data_efficiency": {"data_sampling": {"enabled": False, "dynamic_batching": inner}}}
    assert problems(source) == []
    assert "data_efficiency.data_sampling.dynamic_batching.enabled" in reading(source).notices[0]


def test_members_with_free_names_are_checked_inside() -> None:
    group = {"modules": ["a"], "params": {"dense_ration": 0.5}}
    assert problems({"compression_training": {"row_pruning": {"different_groups": {"mine": group}}}}) == [
        "compression_training.row_pruning.different_groups.mine.params.dense_ration = 0.5: unknown key. "
        'Did you mean "dense_ratio"?'
    ]
    assert problems({"tensor_parallel": {"partition_config": {"layer_specs": [{"pattern": ["a"]}]}}}) == [
        'tensor_parallel.partition_config.layer_specs[0].pattern = ["a"]: unknown key. Did you mean "patterns"?'
    ]


def test_an_old_name_next_to_the_new_one_is_a_conflict() -> None:
    assert problems({"bf16": {}, "bfloat16": {"enabled": True}}) == [
        'bfloat16: an old name of "bf16", which is also given (dict). Keep one of them.'
    ]
    both = {"zero_optimization": {"max_live_parameters": 8, "stage3_max_live_parameters": 8}}
    assert problems(both) == []
    both["zero_optimization"]["max_live_parameters"] = 9
    assert problems(both) == [
        "zero_optimization.max_live_parameters: another name of "
        '"zero_optimization.stage3_max_live_parameters", which is also given (dict). Keep one of them.'
    ]


@pytest.mark.parametrize("name", ["_comment", "__comment__", "_comment_2", "comment", "//", "# why", "$schema"])
def test_a_comment_may_stand_anywhere(name: str) -> None:
    source = {name: "about", "zero_optimization": {name: ["about"], "offload_param": {name: {"stage": 9}}}}
    assert (reading(source).problems, reading(source).notices) == ((), ())


def test_a_dotted_name_that_is_no_key_is_unknown() -> None:
    assert problems({"zero_optimization.reduce_bucket_sise": 1, "a.b": 1}) == [
        "zero_optimization.reduce_bucket_sise = 1: unknown key. No known key is near: remove it.",
        "a.b = 1: unknown key. No known key is near: remove it.",
    ]
    assert "unknown key" in problems({"fp16": {"zero_optimization.stage": 1}})[0]


def test_auto_is_left_out_of_sections_alone() -> None:
    source = {"prescale_gradients": "auto", "fp16": {"enabled": True, "loss_scale": "auto"}, "compile": {"x": "auto"}}
    assert [problem.partition(" = ")[0] for problem in problems(source)] == ["prescale_gradients", "compile.x"]
    settings = reading({"zero_optimization": {"stage": 3, "offload_param": "auto"}}).settings.zero_optimization
    assert (settings.stage, settings.offload_param.device) == (3, "none")
    off = {"flops_profiler": {"enabled": "auto", "profile_step": 3}}
    assert reading(off).notices[1].endswith("the section is switched off")


def test_an_old_switch_that_is_off_or_null_changes_nothing() -> None:
    source = {"fp32_allreduce": False, "zero_optimization": {"cpu_offload": None}, "communication_data_type": "bf16"}
    assert (reading(source).problems, reading(source).notices) == ((), ())
    assert reading(source).settings.communication_data_type == "bfloat16"
    assert reading({"fp32_allreduce": True}).settings.communication_data_type == "float32"


def test_objects_stand_where_deepspeed_takes_them() -> None:
    source = {"tensor_parallel": {"autotp_size": 2, "tp": {"mpu": object(), "tp_group": object()}}}
    assert problems(source) == []
    assert reading(source).notices == (
        "dict: tensor_parallel.tp.mpu, tensor_parallel.tp.tp_group have no effect here: neighbouring ranks split a "
        "model unless initialize(mesh=, mpu=) places them",
    )


def test_an_old_name_of_the_wrong_type_is_reported_under_the_old_name() -> None:
    assert problems({"bfloat16": {"enabled": 3}, "zero_optimization": {"cpu_offload": "cpu"}}) == [
        'zero_optimization.cpu_offload = "cpu": needs true or false, got text',
        'bfloat16.enabled = 3: needs true, false or "auto", got a number',
    ]


def test_an_old_name_beside_its_broken_new_section_does_not_hide_it() -> None:
    assert problems({"zero_optimization": {"cpu_offload": False, "offload_optimizer": "cpu"}}) == [
        'zero_optimization.offload_optimizer = "cpu": needs an object {...}, got text. Write {"device": "cpu"}.'
    ]


def test_a_bad_leaf_keeps_its_default_and_its_neighbours_their_values() -> None:
    settings = reading({"fp16": {"enabled": True, "hysteresis": 0, "loss_scale": 128}}).settings
    assert (settings.fp16.enabled, settings.fp16.hysteresis, settings.fp16.loss_scale) == (True, 2, 128.0)


def test_null_is_the_way_to_write_a_default_that_is_derived() -> None:
    source = {"train_batch_size": None, "communication_data_type": None, "steps_per_print": None, "log_level": None}
    assert reading(source).problems == ()
    assert reading(source).given == {}
    assert problems({"gradient_clipping": None}) == ["gradient_clipping = null: needs a number, got null"]


def test_never_printing_may_be_written_as_infinity() -> None:
    assert reading({"steps_per_print": float("inf")}).settings.steps_per_print == 0


def test_the_timer_section_is_on_unless_told_otherwise() -> None:
    assert reading({"timers": {"throughput": {"synchronized": True}}}).notices == ()
    assert reading({"timers": {"throughput": {"enabled": False}}}).settings.timers.throughput.enabled is False
