"""The table of keys: complete against the reference list, and frozen where it is ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from zengine.config.grammar.table import Key, Section, Support, walk
from zengine.config.keys.root import ROOT

REFERENCE = Path(__file__).with_name("reference_keys.txt")


def reference_keys() -> list[tuple[str, str]]:
    """(dotted path, category) of every key of the reference."""
    found = []
    for line in REFERENCE.read_text().splitlines():
        if line and not line.startswith("#"):
            section, category, names = line.split(": ")
            prefix = "" if section == "." else f"{section}."
            found += [(f"{prefix}{name}", category) for name in names.split()]
    return found


KNOWN = {".".join(path): entry for path, entry in walk(ROOT)}


@pytest.mark.parametrize(("path", "category"), reference_keys())
def test_every_reference_key_is_recognised_with_its_category(path: str, category: str) -> None:
    assert KNOWN[path].support.value == category


def test_the_reference_list_holds_no_key_twice() -> None:
    paths = [path for path, _ in reference_keys()]
    assert len(paths) == len(set(paths)) > 350


AMP = (
    *("opt_level", "loss_scale", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights", "num_losses"),
    *("cast_model_type", "cast_model_outputs", "verbosity", "min_loss_scale", "max_loss_scale"),
)  # Apex's own, which DeepSpeed handed on unseen


def test_keys_beyond_the_reference_list_are_few_and_named() -> None:
    extra = {path for path in KNOWN if not path.endswith("*")} - {path for path, _ in reference_keys()}
    technique = ("shared_parameters", "different_groups")
    extra = {path for path in extra if not any(part in path for part in technique)}
    assert extra == {
        "config_version",
        *("checkpoint.async_save", "checkpoint.keep", "checkpoint.keep.best", "checkpoint.keep.every"),
        *("checkpoint.keep.last", "checkpoint.keep.tags"),
        *("bench_steps", "tensorboard.gradient_histograms"),
        *("jsonl_monitor", "jsonl_monitor.enabled", "jsonl_monitor.output_path", "jsonl_monitor.job_name"),
        *("mlflow", "mlflow.enabled", "mlflow.experiment", "mlflow.run_id", "mlflow.run_name"),
        *("mlflow.samples_log_interval", "mlflow.tracking_uri"),
        *("aim", "aim.enabled", "aim.experiment", "aim.repo", "aim.run_hash", "aim.run_name"),
        *("trackio", "trackio.enabled", "trackio.group", "trackio.project", "trackio.run_name", "trackio.space_id"),
        *("timers.throughput.count_flops_at", "timers.throughput.hidden_size", "timers.throughput.num_layers"),
        *("timers.throughput.peak_tflops", "timers.throughput.recomputation"),
        *("timers.throughput.tokens_per_sample", "timers.throughput.warmup_steps"),
        *(
            "profiler",
            "profiler.enabled",
            "profiler.start_step",
            "profiler.steps",
            "profiler.folder",
            "profiler.ranks",
        ),
        *("profiler.record_shapes", "profiler.with_stack", "profiler.profile_memory", "profiler.memory_snapshot"),
        *(f"amp.{key}" for key in AMP),
        *("torch_autocast.loss_scale", "fp8", "fp8.enabled", "fp8.exclude", "fp8.modules"),
        *("autotuning.tuner_early_stopping", "autotuning.tuner_num_trials", "zero_optimization.stage3_unit_size"),
        *("activation_checkpointing.modules", "dataloader_prefetch", "pipeline.schedule", "flops_profiler.step"),
        *("progressive_layer_drop.layers", "progressive_layer_drop.seed", "quantize_training.modules"),
        "compression_training.distillation",
        *(f"compression_training.distillation.{key}" for key in ("enabled", "output", "temperature", "weight")),
        *("verify_replicas_every", "signals", "signals.save_dir", "signals.sigterm", "signals.sigusr1"),
        "signals.exit_code",
        *("diloco", "diloco.fragments", "diloco.groups", "diloco.merge_alpha", "diloco.outer", "diloco.outer.lr"),
        *("diloco.outer.momentum", "diloco.outer.nesterov", "diloco.quantize_bits", "diloco.sync_delay"),
        *("diloco.start_step", "diloco.sync_every"),
    }


HONOURED = """
activation_checkpointing.contiguous_memory_optimization activation_checkpointing.cpu_checkpointing
activation_checkpointing.modules activation_checkpointing.number_checkpoints
activation_checkpointing.partition_activations
activation_checkpointing.profile activation_checkpointing.synchronize_checkpoint_boundary
config_version
bench_steps
amp.enabled amp.loss_scale amp.opt_level
autotuning.arg_mappings autotuning.enabled autotuning.end_profile_step autotuning.exps_dir autotuning.fast
autotuning.max_train_batch_size autotuning.max_train_micro_batch_size_per_gpu autotuning.metric autotuning.metric_path
autotuning.min_train_micro_batch_size_per_gpu autotuning.model_info_path autotuning.num_tuning_micro_batch_sizes
autotuning.overwrite autotuning.results_dir autotuning.start_profile_step autotuning.tuner_early_stopping
autotuning.tuner_num_trials autotuning.tuner_type
bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states bf16.check_grad_overflow bf16.enabled
fp16.fp16_master_weights_and_grads fp8.enabled fp8.exclude fp8.modules
torch_autocast.dtype torch_autocast.enabled torch_autocast.loss_scale torch_autocast.lower_precision_safe_modules
data_types.buffer_dtype data_types.keep_in_fp32_modules data_types.param_dtype
checkpoint.async_save checkpoint.keep.best checkpoint.keep.every checkpoint.keep.last checkpoint.keep.tags
checkpoint.tag_validation
aim.enabled aim.experiment aim.repo aim.run_hash aim.run_name
comet.api_key comet.enabled comet.experiment_key comet.experiment_name comet.mode comet.online comet.project
comet.samples_log_interval comet.workspace
comms_logger.debug comms_logger.enabled comms_logger.prof_all comms_logger.prof_ops comms_logger.verbose
communication_data_type
csv_monitor.enabled csv_monitor.job_name csv_monitor.output_path
data_parallel_size data_types.grad_accum_dtype dataloader_drop_last
dump_state
flops_profiler.detailed flops_profiler.enabled flops_profiler.module_depth flops_profiler.output_file
flops_profiler.profile_step flops_profiler.recompute_fwd_factor flops_profiler.top_modules
fp16.auto_cast fp16.consecutive_hysteresis fp16.enabled fp16.hysteresis fp16.initial_scale_power
fp16.loss_scale fp16.loss_scale_window fp16.min_loss_scale
disable_python_gc
diloco.fragments diloco.groups diloco.merge_alpha diloco.outer.lr diloco.outer.momentum diloco.outer.nesterov
diloco.quantize_bits diloco.start_step diloco.sync_delay diloco.sync_every
gradient_accumulation_steps gradient_allreduce_op gradient_clipping gradient_predivide_factor
hybrid_engine.enabled hybrid_engine.max_out_tokens hybrid_engine.release_inference_cache
hybrid_engine.inference_tp_size
jsonl_monitor.enabled jsonl_monitor.job_name jsonl_monitor.output_path
log_level
managed_gradient_accumulation
memory_breakdown
mlflow.enabled mlflow.experiment mlflow.run_id mlflow.run_name mlflow.samples_log_interval mlflow.tracking_uri
trackio.enabled trackio.group trackio.project trackio.run_name trackio.space_id
optimizer.params optimizer.type
pipeline.activation_checkpoint_interval pipeline.grad_partitioned pipeline.partition pipeline.pipe_partitioned
pipeline.schedule pipeline.seed_layers pipeline.stages
prescale_gradients
profiler.enabled profiler.folder profiler.memory_snapshot profiler.profile_memory profiler.ranks
profiler.record_shapes profiler.start_step profiler.steps profiler.with_stack
progressive_layer_drop.enabled progressive_layer_drop.gamma progressive_layer_drop.layers
progressive_layer_drop.seed progressive_layer_drop.theta
signals.exit_code signals.save_dir signals.sigterm signals.sigusr1 verify_replicas_every
quantize_training.eigenvalue.enabled quantize_training.eigenvalue.gas_boundary_resolution
quantize_training.eigenvalue.layer_name quantize_training.eigenvalue.layer_num quantize_training.eigenvalue.max_iter
quantize_training.eigenvalue.stability quantize_training.eigenvalue.tol quantize_training.eigenvalue.verbose
quantize_training.enabled quantize_training.fp16_mixed_quantize.enabled
quantize_training.fp16_mixed_quantize.quantize_change_ratio quantize_training.modules
quantize_training.quantize_algo.q_type quantize_training.quantize_algo.rounding
quantize_training.quantize_bits.start_bits quantize_training.quantize_bits.target_bits
quantize_training.quantize_groups quantize_training.quantize_schedule.quantize_period
quantize_training.quantize_schedule.schedule_offset quantize_training.quantize_verbose
sparse_attention.attention sparse_attention.block sparse_attention.different_layout_per_head
sparse_attention.global_block_end_indices sparse_attention.global_block_indices
sparse_attention.horizontal_global_attention sparse_attention.local_window_blocks sparse_attention.mode
sparse_attention.num_different_global_patterns sparse_attention.num_global_blocks
sparse_attention.num_local_blocks sparse_attention.num_random_blocks sparse_attention.num_sliding_window_blocks
sparse_gradients
scheduler.params scheduler.type
sequence_parallel_size
steps_per_print
tensor_parallel.autotp_size tensor_parallel.tp.tp_grain_size tensor_parallel.tp.tp_size
tensor_parallel.partition_config.layer_specs.*.gather_output
tensor_parallel.partition_config.layer_specs.*.model_types
tensor_parallel.partition_config.layer_specs.*.partition_dim
tensor_parallel.partition_config.layer_specs.*.partition_type
tensor_parallel.partition_config.layer_specs.*.patterns
tensor_parallel.partition_config.layer_specs.*.shape
tensor_parallel.partition_config.strict_mode tensor_parallel.partition_config.use_default_specs
tensor_parallel.vocab_parallel_lm_head
eigenvalue.enabled eigenvalue.gas_boundary_resolution eigenvalue.layer_name eigenvalue.layer_num
eigenvalue.max_iter eigenvalue.stability eigenvalue.tol eigenvalue.verbose
elasticity.enabled elasticity.ignore_non_elastic_batch_info elasticity.max_gpus elasticity.max_train_batch_size
elasticity.micro_batch_sizes elasticity.min_gpus elasticity.model_parallel_size elasticity.num_gpus_per_node
elasticity.prefer_larger_batch elasticity.version
expert_parallel.enabled expert_parallel.autoep_size expert_parallel.moe_layer_pattern
tensorboard.enabled tensorboard.gradient_histograms tensorboard.job_name tensorboard.output_path
timers.throughput.count_flops_at timers.throughput.enabled timers.throughput.hidden_size
timers.throughput.num_layers timers.throughput.peak_tflops timers.throughput.recomputation
timers.throughput.tokens_per_sample timers.throughput.warmup_steps
train_batch_size train_micro_batch_size_per_gpu
wall_clock_breakdown
wandb.enabled wandb.group wandb.project wandb.team
zero_optimization.ignore_unused_parameters
zero_optimization.leaf_module.classes zero_optimization.leaf_module.name_suffixes zero_optimization.leaf_module.names
zero_optimization.allgather_bucket_size
zero_optimization.offload_optimizer.buffer_count zero_optimization.offload_optimizer.device
zero_optimization.offload_optimizer.cpuadam_cores_perc zero_optimization.offload_param.buffer_count
zero_optimization.offload_param.buffer_size zero_optimization.offload_param.max_in_cpu
zero_optimization.offload_optimizer.nvme_path zero_optimization.offload_optimizer.pin_memory
zero_optimization.offload_optimizer.ratio zero_optimization.offload_optimizer.super_offload
zero_optimization.offload_param.device zero_optimization.offload_param.nvme_path
zero_optimization.offload_param.pin_memory
zero_optimization.sub_group_size
aio.block_size aio.intra_op_parallelism aio.queue_depth
zero_optimization.load_from_fp32_weights zero_optimization.overlap_comm
zero_optimization.reduce_at zero_optimization.reduce_bucket_size zero_optimization.stage
zero_optimization.shard_group_size
zero_optimization.stage3_max_live_parameters zero_optimization.stage3_max_reuse_distance
zero_optimization.stage3_model_persistence_threshold zero_optimization.stage3_param_persistence_threshold
zero_optimization.stage3_prefetch_bucket_size zero_optimization.stage3_unit_size
zero_optimization.zero_hpz_partition_size zero_optimization.zero_quantized_gradients
zero_optimization.zero_quantized_nontrainable_weights zero_optimization.zero_quantized_weights
zero_optimization.zeropp_loco_param.err_beta zero_optimization.zeropp_loco_param.reset_T
zero_optimization.zenflow.auto_ratio zero_optimization.zenflow.full_warm_up_rounds zero_optimization.zenflow.offload
zero_optimization.zenflow.overlap_step zero_optimization.zenflow.pt_reserved_cores_perc
zero_optimization.zenflow.select_interval zero_optimization.zenflow.select_strategy
zero_optimization.zenflow.steps_per_epoch zero_optimization.zenflow.topk_ratio
zero_optimization.zenflow.update_interval
compression_training.activation_quantization.different_groups.*.modules
compression_training.activation_quantization.different_groups.*.params.bits
compression_training.activation_quantization.different_groups.*.related_modules
compression_training.activation_quantization.shared_parameters.enabled
compression_training.activation_quantization.shared_parameters.quantization_type
compression_training.activation_quantization.shared_parameters.range_calibration
compression_training.activation_quantization.shared_parameters.schedule_offset
compression_training.channel_pruning.different_groups.*.modules
compression_training.channel_pruning.different_groups.*.params.dense_ratio
compression_training.channel_pruning.different_groups.*.related_modules
compression_training.channel_pruning.shared_parameters.enabled
compression_training.channel_pruning.shared_parameters.method
compression_training.channel_pruning.shared_parameters.schedule_offset compression_training.distillation.enabled
compression_training.distillation.output compression_training.distillation.temperature
compression_training.distillation.weight compression_training.head_pruning.different_groups.*.modules
compression_training.head_pruning.different_groups.*.params.dense_ratio
compression_training.head_pruning.different_groups.*.related_modules
compression_training.head_pruning.shared_parameters.enabled
compression_training.head_pruning.shared_parameters.method
compression_training.head_pruning.shared_parameters.num_heads
compression_training.head_pruning.shared_parameters.schedule_offset compression_training.layer_reduction.enabled
compression_training.layer_reduction.module_name_prefix
compression_training.layer_reduction.other_module_name compression_training.layer_reduction.teacher_layer
compression_training.row_pruning.different_groups.*.modules
compression_training.row_pruning.different_groups.*.params.dense_ratio
compression_training.row_pruning.different_groups.*.related_modules
compression_training.row_pruning.shared_parameters.enabled compression_training.row_pruning.shared_parameters.method
compression_training.row_pruning.shared_parameters.schedule_offset
compression_training.sparse_pruning.different_groups.*.modules
compression_training.sparse_pruning.different_groups.*.params.dense_ratio
compression_training.sparse_pruning.different_groups.*.related_modules
compression_training.sparse_pruning.shared_parameters.block_pattern
compression_training.sparse_pruning.shared_parameters.enabled
compression_training.sparse_pruning.shared_parameters.follow_weights
compression_training.sparse_pruning.shared_parameters.method
compression_training.sparse_pruning.shared_parameters.schedule_offset
compression_training.weight_quantization.different_groups.*.modules
compression_training.weight_quantization.different_groups.*.params.format
compression_training.weight_quantization.different_groups.*.params.quantization_period
compression_training.weight_quantization.different_groups.*.params.start_bits
compression_training.weight_quantization.different_groups.*.params.target_bits
compression_training.weight_quantization.different_groups.*.related_modules
compression_training.weight_quantization.shared_parameters.enabled
compression_training.weight_quantization.shared_parameters.fp16_mixed_quantize.enabled
compression_training.weight_quantization.shared_parameters.fp16_mixed_quantize.quantize_change_ratio
compression_training.weight_quantization.shared_parameters.quantization_type
compression_training.weight_quantization.shared_parameters.quantize_groups
compression_training.weight_quantization.shared_parameters.quantize_verbose
compression_training.weight_quantization.shared_parameters.quantize_weight_in_forward
compression_training.weight_quantization.shared_parameters.rounding
compression_training.weight_quantization.shared_parameters.schedule_offset
curriculum_learning.curriculum_type curriculum_learning.enabled curriculum_learning.max_difficulty
curriculum_learning.min_difficulty curriculum_learning.schedule_config.difficulty
curriculum_learning.schedule_config.difficulty_step curriculum_learning.schedule_config.max_step
curriculum_learning.schedule_config.root_degree curriculum_learning.schedule_config.total_curriculum_step
curriculum_learning.schedule_type data_efficiency.data_routing.enabled
data_efficiency.data_routing.random_ltd.enabled data_efficiency.data_routing.random_ltd.hidden_state_order
data_efficiency.data_routing.random_ltd.model_mask_name
data_efficiency.data_routing.random_ltd.model_type data_efficiency.data_routing.random_ltd.random_ltd_layer_id
data_efficiency.data_routing.random_ltd.random_ltd_layer_num
data_efficiency.data_routing.random_ltd.random_ltd_schedule.max_value
data_efficiency.data_routing.random_ltd.random_ltd_schedule.min_value
data_efficiency.data_routing.random_ltd.random_ltd_schedule.schedule_config.require_steps
data_efficiency.data_routing.random_ltd.random_ltd_schedule.schedule_config.seq_per_step
data_efficiency.data_routing.random_ltd.random_ltd_schedule.schedule_type
data_efficiency.data_routing.random_ltd.total_layer_num
data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.*.clustering_type
data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.*.difficulty_type
data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.*.index_to_metric_path
data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.*.index_to_sample_path
data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.*.max_difficulty
data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.*.min_difficulty
data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.*.schedule_config.difficulty
data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.*.schedule_config.difficulty_step
data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.*.schedule_config.max_step
data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.*.schedule_config.root_degree
data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.*.schedule_config.total_curriculum_step
data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.*.schedule_type
data_efficiency.data_sampling.curriculum_learning.enabled data_efficiency.data_sampling.dynamic_batching.enabled
data_efficiency.data_sampling.dynamic_batching.lr_scaling_method
data_efficiency.data_sampling.dynamic_batching.max_batch_size
data_efficiency.data_sampling.dynamic_batching.max_tokens
data_efficiency.data_sampling.dynamic_batching.metrics_path
data_efficiency.data_sampling.dynamic_batching.min_batch_size
data_efficiency.data_sampling.dynamic_batching.sequence_picking_order data_efficiency.data_sampling.enabled
data_efficiency.data_sampling.num_epochs data_efficiency.data_sampling.num_workers
data_efficiency.data_sampling.pin_memory data_efficiency.enabled data_efficiency.seed dataloader_prefetch
"""


def test_the_honoured_options_are_frozen() -> None:
    """A ratchet: an option that is added or dropped is named here, in the same change."""
    honoured = sorted(path for path, entry in KNOWN.items() if entry.support is Support.HONOURED)
    assert honoured == sorted(HONOURED.split())


def test_every_key_says_why_it_does_not_act() -> None:
    speechless = {
        path
        for path, entry in KNOWN.items()
        if isinstance(entry, Key) and entry.support in (Support.FIXED, Support.REJECTED) and not entry.why
    }
    assert speechless == set()


def test_every_honoured_key_is_documented_and_its_default_is_of_its_kind() -> None:
    for path, entry in KNOWN.items():
        if isinstance(entry, Key) and entry.support is Support.HONOURED:
            assert entry.doc, path
            derived_when_zero = entry.default == 0 and path.endswith(("_size", "_steps", "_gpu"))
            not_given_when_empty = entry.default == ""
            if not derived_when_zero and not not_given_when_empty:
                assert entry.kind.read(entry.default) == entry.default, path


def test_every_natural_value_is_of_its_kind() -> None:
    for path, entry in KNOWN.items():
        if isinstance(entry, Key):
            assert all(entry.kind.read(value) == value for value in entry.matching), path


def test_every_renamed_key_points_at_a_known_one() -> None:
    for path, entry in KNOWN.items():
        if isinstance(entry, Key) and entry.support is Support.RENAMED:
            home = path.rpartition(".")[0]
            assert ".".join(filter(None, (home, *entry.target))) in KNOWN, path


def test_the_switch_of_every_section_is_one_of_its_keys() -> None:
    for path, entry in KNOWN.items():
        if isinstance(entry, Section) and entry.switch:
            assert entry.switch in entry.keys, path
