"""Attributes of the module through the engine: reached, or hidden with a log line; old names raise."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from zengine.deepspeed_engine import DeepSpeedEngine
from zengine.deepspeed_getters import PlanGetters
from zengine.engine.engine import Engine
from zengine.engine.module_attributes import collisions, public_names
from zengine.pipeline_engine import PipelineEngine
from zengine.testing import Regression, rank_batch, small_engine

# Public names of DeepSpeed 0.19.8's engine, methods and instance attributes, as far as this one has them.
_DEEPSPEEDS = (
    "allreduce_gradients autotp_size backward bf16_master_weights_and_gradients bf16_optimizer_states "
    "bfloat16_enabled checkpoint_tag_validation_enabled checkpoint_tag_validation_fail coalesce_grad_reduction "
    "collate_fn collect_python_gc communication_data_type compile config curriculum_learning_enabled "
    "dataloader_drop_last deepspeed_io destroy device dp_world_size dump_state dynamic_loss_scale "
    "empty_partition_cache eval_batch fp16_auto_cast fp16_enabled fp16_master_weights_and_gradients forward "
    "checkpoint_engine flops_profiler grid sparse_tensor_module_names tput_timer "
    "get_batch_info get_data_types get_global_grad_norm get_lr get_mom get_sequence_parallel_group get_type "
    "global_rank global_samples global_steps gradient_accumulation_steps gradient_clipping "
    "gradient_predivide_factor is_compiled is_first_stage is_gradient_accumulation_boundary is_last_stage "
    "load_checkpoint load_module_state_dict local_rank loss_scale lr_scheduler memory_breakdown micro_batches "
    "micro_steps module module_state_dict monitor no_sync num_stages offload_states optimizer optimizer_name "
    "optimizer_params random_ltd_enabled recording reload_states reset_activation_shape save_16bit_model "
    "save_checkpoint save_fp16_model scale scheduler_name scheduler_params seq_parallel_group "
    "sequence_parallel_size set_batch_fn set_custom_curriculum_learning_schedule set_data_post_process_func "
    "set_dataiterator set_dataloader set_gradient_accumulation_boundary set_train_batch_size "
    "set_train_micro_batch_size skipped_steps stage_id step steps_per_print torch_autocast_dtype "
    "torch_autocast_enabled torch_autocast_lower_precision_safe_modules train_batch train_batch_size "
    "train_micro_batch_size_per_gpu training_dataloader wall_clock_breakdown was_step_applied world_size "
    "zero_cpu_offload zero_gather_16bit_weights_on_model_save zero_ignore_unused_parameters "
    "zero_max_live_parameters zero_max_reuse_distance zero_model_persistence_threshold zero_offload_optimizer "
    "zero_offload_param zero_optimization zero_optimization_partition_gradients zero_optimization_partition_weights "
    "zero_optimization_stage zero_overlap_comm zero_param_persistence_threshold zero_prefetch_bucket_size "
    "zero_reduce_bucket_size "
    "aio_config all_gather_scalar autotuning_enabled "
    "autotuning_end_profile_step autotuning_metric autotuning_metric_path autotuning_model_info_path "
    "autotuning_profile_model_info autotuning_start_profile_step basic_optimizer "
    "checkpoint_serialization_enabled checkpoint_writer_enabled client_lr_scheduler client_optimizer compile_autosp "
    "compile_autotp compile_zero_optimization_stage cpuadam_cores_perc curriculum_learning_config "
    "data_efficiency_config data_efficiency_enabled data_parallel_group data_sampling_config data_sampling_enabled "
    "dist_backend dynamic_loss_scale_args expert_data_parallel_group expert_parallel_group flops_profiler_detailed "
    "flops_profiler_enabled flops_profiler_module_depth flops_profiler_output_file flops_profiler_profile_step "
    "flops_profiler_recompute_fwd_factor flops_profiler_top_modules get_data_parallel_rank get_model_parallel_rank "
    "get_tensor_parallel_rank gradient_average has_moe_layers initial_dynamic_scale inside_no_sync_ctxt "
    "is_deepcompile_active is_deepcompile_enabled is_first_weights_partition_group is_sanity_checks_enabled "
    "load_universal_checkpoint log_level managed_gradient_accumulation mp_world_size mpu num_experts "
    "optimizer_legacy_fusion param_names pipeline_parallelism postscale_gradients random_ltd_config "
    "seq_data_parallel_group seq_dp_world_size super_offload swap_tensor_config tensor_parallel_config "
    "use_node_local_storage uses_parallelization_pass_only zenflow_config zero_allgather_bucket_size "
    "zero_allgather_partitions zero_allgather_sequential zero_allow_untested_optimizer zero_compute_grad_norm "
    "zero_contiguous_gradients zero_elastic_checkpoint zero_force_ds_cpu_optimizer zero_hpz_partition_size "
    "zero_legacy_stage1 zero_load_from_fp32_weights zero_log_trace_cache_warnings zero_module_granularity_threshold "
    "zero_multi_rank_bucket_allreduce zero_nvme_offload_optimizer zero_parameter_alignment zero_partial_offload "
    "zero_quantized_gradients zero_quantized_nontrainable_weights zero_quantized_weights zero_reduce_scatter "
    "zero_round_robin_gradients zero_save_muon_momentum_buffer_in_memory zero_sub_group_size zero_use_cpu_optimizer "
    "csv_monitor_enabled curriculum_params_legacy eigenvalue_enabled elasticity_enabled pld_enabled "  # of older ones
    "block_eigenvalue eigenvalue_gas_boundary_resolution eigenvalue_layer_name eigenvalue_layer_num "
    "eigenvalue_max_iter eigenvalue_stability eigenvalue_tol eigenvalue_verbose "
    "get_pld_theta pld_gamma pld_params pld_theta quantize_training quantize_training_enabled "
    "tensorboard_enabled wandb_enabled "
    "engine_timers get_wall_clock_timers random_ltd_initialize timers "
    "amp_enabled curriculum_enabled_legacy prescale_gradients sparse_gradients_enabled"  # of older versions
)
DEEPSPEEDS = frozenset(_DEEPSPEEDS.split())
OURS = {"activation_checkpointing", "applied_steps", "curriculum_seqlen", "current_loss_scale", "set_lr"}
_ENGINES = (
    "add_feature backward clock close forward last_report load_checkpoint load_state_dict load_weights module "
    "no_sync parts paused plan report_tokens restart_step restore_from_memory save_checkpoint scale span state_dict "
    "step wait_for_checkpoint zero_grad"
)
ENGINES = frozenset(_ENGINES.split())


class Vgg(Regression):
    """A model with the attributes that image models have."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.losses, self.transitions = nn.Identity(), [1.0], 3

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.features(x))


def test_features_and_losses_of_the_module_are_reached_through_the_engine(caplog):
    model = Vgg()
    with caplog.at_level(logging.WARNING, "zengine"):
        engine = small_engine(model)
    assert engine.features is model.features
    assert engine.losses is model.losses
    assert engine.transitions == 3
    assert "hidden by" not in caplog.text
    engine.backward(engine(rank_batch(0)))
    assert engine.step()


class Planner(Regression):
    """A model with names of the engine's: an instance attribute, a submodule, a buffer, a method, a property."""

    def __init__(self) -> None:
        super().__init__()
        self.plan, self.parts = "mine", nn.Identity()
        self.register_buffer("clock", torch.zeros(1))
        self.config, self.world = {}, "the model's"

    def span(self) -> int:
        return 3

    @property
    def device(self) -> str:
        raise AssertionError("looking for names runs no code of the model")


def test_what_stays_hidden_is_logged_with_the_way_to_reach_it(caplog):
    with caplog.at_level(logging.WARNING, "zengine"):
        engine = small_engine(Planner())
    assert collisions(engine) == ["clock", "config", "device", "parts", "plan", "span"]
    assert (
        "attributes of Planner are hidden by attributes of the engine: clock, config, device, parts, plan, span. Use"
        in caplog.text
    )
    assert caplog.text.count("engine.module.plan") == 1
    assert engine.world == "the model's"
    engine.backward(engine(rank_batch(0)))
    assert engine.step()
    assert engine.module.plan == "mine"


def test_an_old_name_raises_an_error_with_the_new_one():
    engine = small_engine()
    with pytest.raises(AttributeError, match=r"engine\.world was renamed in 0\.3\.0; use engine\.parts\.world\."):
        engine.world  # noqa: B018
    with pytest.raises(AttributeError, match=r"engine\.bench_done was .* use engine\.monitor\.bench_done\."):
        engine.bench_done  # noqa: B018
    assert (engine.parts.world.rank, engine.monitor.bench_done) == (0, False)
    assert not hasattr(engine, "world")


def test_an_engine_is_a_module_with_few_public_members():
    assert Engine.__bases__ == (nn.Module,)
    engine = small_engine()
    members = {name for name in (*vars(Engine), *vars(engine), "module") if not name.startswith("_")}
    assert len(members) <= 25, sorted(members)
    assert members - {"training"} == ENGINES
    assert {name for name in vars(engine) if not name.startswith("_")} == {"training"}


def test_every_public_name_is_the_engines_or_deepspeeds_and_is_documented():
    table = {name for name in (*vars(DeepSpeedEngine), *vars(PlanGetters)) if not name.startswith("_")}
    assert table - DEEPSPEEDS - {"train"} == OURS
    pipelines = {name for name in vars(PipelineEngine) if not name.startswith("_")} - ENGINES
    assert pipelines - DEEPSPEEDS == {"pipeline"}
    assert public_names(small_engine()) <= ENGINES | table
    text = (Path(__file__).parents[2] / "DEEPSPEED.md").read_text().partition("## Names that hide the module's")[2]
    listed = set(re.findall(r"`(\w+)`", text.partition("\n## ")[0]))
    assert listed == (ENGINES | table | pipelines) - set(dir(nn.Module)) | {"module"}


def test_every_line_of_the_table_says_what_it_is():
    table = {**vars(DeepSpeedEngine), **vars(PlanGetters)}
    assert not [name for name, each in table.items() if not name.startswith("_") and not each.__doc__]
    with pytest.raises(AttributeError, match="global_steps cannot be set"):
        small_engine().global_steps = 3
