"""The section `zero_optimization` as DeepSpeed's classes.  Defaults and errors are those of DeepSpeed 0.19.8."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from zengine.config import ConfigError
from zengine.deepspeed.runtime.zero import config as mirrored
from zengine.deepspeed.runtime.zero.config import DeepSpeedZeroConfig, ZeroStageEnum, get_zero_config
from zengine.deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
from zengine.deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
    OffloadDeviceEnum,
)

# Made by DeepSpeed 0.19.8: DeepSpeedZeroConfig().model_dump(), without what is None and the leaf modules.
DEFAULTS = {
    "stage": 0,
    "contiguous_gradients": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 500_000_000,
    "use_multi_rank_bucket_allreduce": True,
    "allgather_partitions": True,
    "allgather_bucket_size": 500_000_000,
    "overlap_comm": False,
    "compute_grad_norm": True,
    "load_from_fp32_weights": True,
    "elastic_checkpoint": False,
    "sub_group_size": 1_000_000_000,
    "prefetch_bucket_size": 50_000_000,
    "param_persistence_threshold": 100_000,
    "model_persistence_threshold": sys.maxsize,
    "max_live_parameters": 1_000_000_000,
    "max_reuse_distance": 1_000_000_000,
    "gather_16bit_weights_on_model_save": False,
    "module_granularity_threshold": 0,
    "use_all_reduce_for_fetch_params": False,
    "allgather_sequential": False,
    "ignore_unused_parameters": True,
    "legacy_stage1": False,
    "round_robin_gradients": False,
    "parameter_alignment": False,
    "zero_hpz_partition_size": 1,
    "zero_quantized_weights": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_quantized_gradients": False,
    "memory_efficient_linear": True,
    "pipeline_loading_checkpoint": False,
    "override_module_apply": True,
    "log_trace_cache_warnings": False,
    "enable_sanity_checks": False,
    "save_muon_momentum_buffer_in_memory": False,
}


def test_the_defaults_are_deepspeeds():
    dumped = DeepSpeedZeroConfig().model_dump()
    assert {name: dumped[name] for name in DEFAULTS} == DEFAULTS
    param, optimizer = DeepSpeedZeroOffloadParamConfig(), DeepSpeedZeroOffloadOptimizerConfig()
    assert param.model_dump() == {
        "device": "none",
        "nvme_path": None,
        "buffer_count": 5,
        "buffer_size": 100_000_000,
        "max_in_cpu": 1_000_000_000,
        "pin_memory": True,
    }
    assert (optimizer.buffer_count, optimizer.ratio, optimizer.cpuadam_cores_perc) == (4, 1.0, 0.8)
    assert (optimizer.pipeline_read, optimizer.super_offload, optimizer.fast_init) == (False, False, False)


def test_names_with_the_prefix_and_old_names_reach_the_present_ones():
    config = DeepSpeedZeroConfig(stage3_prefetch_bucket_size=12345, max_reuse_distance=7, reduce_bucket_size="auto")
    assert (config.prefetch_bucket_size, config.max_reuse_distance) == (12345, 7)
    assert config.model_fields_set == {"prefetch_bucket_size", "max_reuse_distance"}
    assert DeepSpeedZeroConfig(stage3_gather_fp16_weights_on_model_save=True).gather_16bit_weights_on_model_save
    assert isinstance(DeepSpeedZeroConfig(cpu_offload_param=True).offload_param, DeepSpeedZeroOffloadParamConfig)
    assert DeepSpeedZeroConfig(cpu_offload=True).offload_optimizer.device == OffloadDeviceEnum.cpu
    assert DeepSpeedZeroConfig(cpu_offload=False).offload_optimizer is None
    with pytest.raises(AssertionError, match="'cpu_offload' and replacing parameter 'offload_optimizer'"):
        DeepSpeedZeroConfig(cpu_offload=True, offload_optimizer={"device": "cpu"})


@pytest.mark.parametrize(("stage", "overlaps"), [(0, False), (2, False), (3, True)])
def test_overlap_follows_the_stage_unless_it_is_given(stage, overlaps):
    assert DeepSpeedZeroConfig(stage=stage).overlap_comm is overlaps
    assert DeepSpeedZeroConfig(stage=stage, overlap_comm=not overlaps).overlap_comm is not overlaps


def test_offload_sections_are_objects_and_pipeline_follows_its_parts():
    config = DeepSpeedZeroConfig(
        stage=3, offload_param={"device": "nvme", "nvme_path": "/data"}, offload_optimizer={}
    )
    assert (config.offload_param.device, config.offload_param.nvme_path) == ("nvme", Path("/data"))
    assert config.offload_optimizer == DeepSpeedZeroOffloadOptimizerConfig()
    assert not config.offload_optimizer.pipeline
    assert DeepSpeedZeroOffloadOptimizerConfig(pipeline_write=True).pipeline
    again = DeepSpeedZeroConfig(offload_param=DeepSpeedZeroOffloadParamConfig(device=OffloadDeviceEnum.cpu))
    assert again.offload_param.device == OffloadDeviceEnum.cpu


def test_leaf_modules_are_lists_without_duplicates():
    config = DeepSpeedZeroConfig(leaf_module={"classes": ["a.B", "a.B"], "names": "x"})
    assert (config.leaf_module.classes, config.leaf_module.names) == (["a.B"], ["x"])
    assert len(DeepSpeedZeroConfig().leaf_module.classes) == 3
    assert DeepSpeedZeroConfig().leaf_module == DeepSpeedZeroLeafModuleConfig()


def test_the_section_of_a_whole_config():
    assert get_zero_config({"zero_optimization": True}).stage == ZeroStageEnum.optimizer_states
    assert get_zero_config({"zero_optimization": True, "allgather_size": 64}).allgather_bucket_size == 64
    assert get_zero_config({"zero_optimization": False}).stage == get_zero_config({}).stage == 0
    assert get_zero_config({"zero_optimization": {"stage": 2}}).stage == ZeroStageEnum.gradients


def test_an_assignment_is_checked_like_an_argument():
    config = DeepSpeedZeroConfig(stage=2)
    config.stage = 3
    assert config.stage == 3
    with pytest.raises(ValueError, match="0, 1, 2 or 3"):
        config.stage = 5
    with pytest.raises(AttributeError, match="DeepSpeedZeroConfig has no field 'stages'"):
        config.stages = 3


BAD = [
    ({"stage": 4}, "must be 0, 1, 2 or 3"),
    ({"offload": {"device": "cpu"}}, "unknown key"),
    ({"offload_param": {"device": "disk"}}, 'must be "none", "cpu" or "nvme"'),
    ({"prefetch_bucket_size": -1}, "must be >= 0"),
    ({"offload_optimizer": {"ratio": 2}}, "must be <= 1"),
]


@pytest.mark.parametrize(("given", "told"), BAD)
def test_a_wrong_value_is_pydantics_error_if_pydantic_is_imported(given, told):
    pydantic = pytest.importorskip("pydantic")
    with pytest.raises(pydantic.ValidationError, match=told):
        DeepSpeedZeroConfig(**given)


def test_a_wrong_value_is_a_config_error_without_pydantic(monkeypatch):
    monkeypatch.delitem(sys.modules, "pydantic_core", raising=False)
    with pytest.raises(ConfigError, match=r"zero_optimization\.stage = 4: must be 0, 1, 2 or 3"):
        DeepSpeedZeroConfig(stage=4)


def test_the_classes_do_not_import_pydantic():
    code = (
        f"import sys, {mirrored.__name__} as m; m.DeepSpeedZeroConfig(stage=3); sys.exit('pydantic' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
