"""Getters return the values of the config."""

from __future__ import annotations

import pytest
from torch import nn

import zengine
from zengine import deepspeed

CONFIG = {
    "train_batch_size": 12,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.5,
    "prescale_gradients": True,
    "fp16": {"enabled": True, "auto_cast": True},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 7, "stage3_prefetch_bucket_size": 9},
    "optimizer": {"type": "SGD", "params": {"lr": 0.25}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
    "steps_per_print": 3,
}
EXPECTED = {
    "train_batch_size": 12,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 3,
    "autotp_size": 1,
    "gradient_clipping": 0.5,
    "gradient_predivide_factor": 1.0,
    "prescale_gradients": True,
    "sparse_gradients_enabled": False,
    "optimizer_name": "SGD",
    "optimizer_params": {"lr": 0.25},
    "scheduler_name": "WarmupLR",
    "scheduler_params": {"warmup_num_steps": 5},
    "fp16_enabled": True,
    "bfloat16_enabled": False,
    "fp16_auto_cast": True,
    "dynamic_loss_scale": True,
    "loss_scale": 0.0,
    "zero_optimization_stage": 3,
    "zero_optimization": True,
    "zero_offload_optimizer": None,
    "zero_offload_param": None,
    "zero_cpu_offload": False,
    "zero_overlap_comm": True,
    "zero_ignore_unused_parameters": True,
    "zero_reduce_bucket_size": 1024,  # of the only bucket: nothing limits it
    "zero_allgather_bucket_size": 1024,
    "zero_sub_group_size": 1024,
    "zero_prefetch_bucket_size": 9,
    "zero_param_persistence_threshold": 7,
    "steps_per_print": 3,
    "wall_clock_breakdown": False,
    "memory_breakdown": False,
    "dump_state": False,
    "dataloader_drop_last": False,
    "checkpoint_tag_validation_enabled": True,
    "checkpoint_tag_validation_fail": False,
}


@pytest.fixture(scope="module")
def engine() -> zengine.Engine:
    return zengine.initialize(model=nn.Linear(2, 1), config=CONFIG)[0]


@pytest.mark.parametrize(("name", "value"), EXPECTED.items())
def test_a_getter_answers_what_was_decided(engine, name, value):
    assert getattr(engine, name)() == value
    assert getattr(type(engine), name).__doc__


def test_limits_of_stage_3_are_numbers(engine):
    plan = engine.plan.zero
    assert engine.zero_model_persistence_threshold() == plan.persist_total_numel
    assert (plan.max_live_numel, engine.zero_max_live_parameters()) == (None, 0)
    assert engine.zero_max_reuse_distance() == plan.max_reuse_numel


@pytest.mark.parametrize("initialize", [zengine.initialize, deepspeed.initialize])
def test_sections_about_offload_are_objects(initialize):
    zero = {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "ratio": 0.5},
        "reduce_bucket_size": 70,
        "allgather_bucket_size": 80,
        "sub_group_size": 90,
    }
    engine = initialize(model=nn.Linear(2, 1), config={**CONFIG, "zero_optimization": zero})[0]
    section = engine.zero_offload_optimizer()
    assert (section.device, section.ratio, engine.zero_partial_offload()) == ("cpu", 0.5, 0.5)
    assert engine.zero_offload_param() is None
    assert engine.zero_use_cpu_optimizer()
    sizes = engine.zero_reduce_bucket_size(), engine.zero_allgather_bucket_size(), engine.zero_sub_group_size()
    assert sizes == (70, 80, 90)
    engine.close()


def test_getters_of_what_zengine_does_not_have_say_that_it_is_off(engine):
    off = ("autotuning_enabled", "pld_enabled", "eigenvalue_enabled", "is_deepcompile_enabled", "zero_legacy_stage1")
    assert not any(getattr(engine, name)() for name in off)


def test_getters_return_what_the_config_says():
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 50, "hysteresis": 3},
        "zero_optimization": {"stage": 3, "zero_quantized_weights": True, "offload_optimizer": {"device": "cpu"}},
        "flops_profiler": {"enabled": True, "profile_step": 4, "top_modules": 2},
        "data_efficiency": {"enabled": False, "seed": 3},
        "aio": {"queue_depth": 4},
    }
    engine = zengine.initialize(model=nn.Linear(2, 1), config=config)[0]
    assert (engine.zero_quantized_weights(), engine.zero_quantized_gradients()) == (True, False)
    assert (engine.zero_use_cpu_optimizer(), engine.zero_nvme_offload_optimizer()) == (True, False)
    assert (engine.flops_profiler_enabled(), engine.flops_profiler_profile_step()) == (True, 4)
    assert engine.initial_dynamic_scale() == 256.0
    assert engine.dynamic_loss_scale_args() == {
        "init_scale": 256.0,
        "scale_window": 50,
        "delayed_shift": 3,
        "consecutive_hysteresis": False,
        "min_scale": 1.0,
    }
    assert engine.data_efficiency_config() == {"enabled": False, "seed": 3}
    assert engine.aio_config()["queue_depth"] == 4
    engine.close()
