"""A config that can be looked at before there is an engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import zoptim
from zengine.deepspeed import DeepSpeedConfig, DeepSpeedConfigError
from zengine.deepspeed.runtime import config, constants, lr_schedules


def test_its_numbers_are_resolved_for_the_ranks_that_there_are(capsys):
    found = DeepSpeedConfig(
        {
            "train_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": 2},
        }
    )
    assert (found.train_batch_size, found.train_micro_batch_size_per_gpu) == (8, 4)
    assert (found.optimizer_name, found.scheduler_name, found.zero_optimization_stage) == ("adamw", None, 2)
    found.print()
    assert "zero_optimization.stage" in capsys.readouterr().out
    with pytest.raises(DeepSpeedConfigError, match="train_batch_siz"):
        DeepSpeedConfig({"train_batch_siz": 8})


def test_names_of_optimizers_and_keys_are_those_of_the_config():
    params = [torch.nn.Parameter(torch.ones(2, 2))]
    for name in config.DEEPSPEED_OPTIMIZERS:
        given = [("w", params[0])] if name == "muon" else params
        assert isinstance(zoptim.make_optimizer(name, given, {"lr": 0.1}), torch.optim.Optimizer)
    keys = {
        constants.TRAIN_BATCH_SIZE: 4,
        constants.GRADIENT_CLIPPING: 1.0,
        constants.ZERO_OPTIMIZATION: {"stage": 1},
    }
    assert DeepSpeedConfig(keys).gradient_clipping == 1.0


def test_sections_and_single_keys_have_their_attributes():
    found = DeepSpeedConfig(
        {
            "train_batch_size": 4,
            "fp16": {"enabled": True, "initial_scale_power": 8},
            "zero_optimization": {"stage": 1},
            "csv_monitor": {"enabled": True, "job_name": "mine"},
            "activation_checkpointing": {"number_checkpoints": 3},
            "checkpoint": {"tag_validation": "Fail"},
            "communication_data_type": "bf16",
            "pipeline": {"activation_checkpoint_interval": 2},
            "steps_per_print": 7,
        }
    )
    assert (found.fp16_enabled, found.float16_config.initial_scale_power, found.bfloat16_config.enabled) == (
        True,
        8,
        False,
    )
    assert found.monitor_config.csv_monitor.job_name == "mine"
    assert found.activation_checkpointing_config.number_checkpoints == 3
    assert (found.checkpoint_tag_validation_enabled, found.checkpoint_tag_validation_fail) == (True, True)
    assert (found.zero_enabled, found.communication_data_type) == (True, torch.bfloat16)
    assert (found.pipeline["activation_checkpoint_interval"], found.pipeline["stages"]) == (2, "auto")
    assert vars(found)["steps_per_print"] == 7
    with pytest.raises(ValueError, match="Got: int8"):
        config.get_communication_data_type({"communication_data_type": "int8"})


def test_whole_sections_are_objects_with_deepspeeds_defaults():
    """The values are those of DeepSpeed 0.19.8 for this config."""
    found = DeepSpeedConfig(
        {
            "train_batch_size": 4,
            "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
            "flops_profiler": {"enabled": True, "profile_step": 3},
            "aio": {"block_size": 4096, "thread_count": 2},
            "torch_autocast": {"enabled": False, "dtype": "bfloat16"},
            "timers": {"throughput": {"enabled": False}},
            "data_efficiency": {"enabled": True, "seed": 7, "data_sampling": {"num_workers": 2}},
            "checkpoint": {"tag_validation": "Fail"},
        }
    )
    assert (found.zero_config.stage, found.zero_config.offload_param.device) == (3, "cpu")
    profiler = found.flops_profiler_config
    assert (profiler.profile_step, profiler.detailed, profiler.output_file) == (3, True, None)
    assert found.wall_clock_breakdown
    assert found.aio_config == {
        "block_size": 4096,
        "queue_depth": 8,
        "intra_op_parallelism": 2,
        "single_submit": False,
        "overlap_events": True,
        "use_gds": False,
    }
    assert (found.torch_autocast_enabled, found.torch_autocast_dtype) == (False, torch.bfloat16)
    assert (found.torch_autocast_lower_precision_safe_modules, found.gradient_allreduce_op) == (None, "mean")
    assert (found.timers_config.enabled, found.timers_config.synchronized) == (False, True)
    assert found.data_efficiency_config["data_sampling"]["num_workers"] == 2
    assert found.data_efficiency_config["data_routing"]["random_ltd"]["layer_token_lr_schedule"] == {"enabled": False}
    assert found.checkpoint_config == {"tag_validation": "FAIL", "checkpoint_serialization": True, "writer": None}
    assert (found.hybrid_engine.max_out_tokens, found.hybrid_engine.pin_parameters) == (512, True)
    assert (found.compile_config.deepcompile, found.compile_config.free_activation_threshold) == (False, 10485760)
    tensor = found.tensor_parallel_config
    assert (tensor.autotp_size, tensor.tensor_parallel.tp_size, tensor.preset_model) == (0, 1, None)
    assert (found.expert_parallel_config.autoep_size, found.expert_parallel_config.top_k) == (1, "auto")
    assert (found.autotuning_config.enabled, found.autotuning_config.tuner_num_trials) == (False, 50)
    assert not found.datastates_config.enabled


def test_sections_reject_wrong_values():
    with pytest.raises(ValueError, match=r"inference_tp_size = 0: must be >= 1"):
        config.get_hybrid_engine_config({"hybrid_engine": {"enabled": True, "inference_tp_size": 0}})
    with pytest.raises(ValueError, match="Got: 'max'"):
        config.get_gradient_allreduce_op({"gradient_allreduce_op": "max"})
    with pytest.raises(ValueError, match="Invalid dtype for torch autocast: int8"):
        config.get_torch_autocast_dtype({"torch_autocast": {"dtype": "int8"}})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((32, 8, None), (32, 8, 4)),
        ((32, None, 2), (32, 16, 2)),
        ((None, 8, 2), (16, 8, 2)),
        ((None, 8, None), (8, 8, 1)),
        ((33, 17, 2), None),
        ((None, None, 2), None),
    ],
)
def test_batch_sizes_are_completed_or_asserted(given: tuple[int | None, ...], expected: tuple[int, ...] | None):
    """As DeepSpeed's test of batch sizes does, here for one rank."""
    found = DeepSpeedConfig({"train_batch_size": 1})
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for name, value in zip(names, given):
        setattr(found, name, value)
    if expected is None:
        with pytest.raises(AssertionError):
            found._configure_train_batch_size()
    else:
        found._configure_train_batch_size()
        assert tuple(getattr(found, name) for name in names) == expected


def test_a_file_is_edited_and_a_repeated_key_is_rejected(tmp_path: Path):
    writer = config.DeepSpeedConfigWriter({"train_batch_size": 2})
    writer.add_config("steps_per_print", 3)
    writer.write_config(tmp_path / "a.json")
    again = config.DeepSpeedConfigWriter()
    again.load_config(tmp_path / "a.json")
    assert again.data == {"train_batch_size": 2, "steps_per_print": 3}
    (tmp_path / "b.json").write_text('{"train_batch_size": 24, "train_batch_size": 24}')
    with pytest.raises(ValueError, match="train_batch_size"):
        DeepSpeedConfig(tmp_path / "b.json")


def test_names_of_schedules_build_them():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    options = {"OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_momentum": False}}
    options |= {key: {"total_num_steps": 2000} for key in ("WarmupDecayLR", "WarmupCosineLR")}
    for name in lr_schedules.VALID_LR_SCHEDULES:
        made = zoptim.make_schedule(name, optimizer, options.get(name, {}))
        assert type(made) is getattr(lr_schedules, name)
