"""DeepSpeed's getters on an engine: methods without arguments that return what its plan has decided.

    engine.train_batch_size()                  # engine.plan.batch.train_batch_size
    engine.zero_quantized_weights()            # engine.plan.zero.weight_bits > 0

A row is `Setting[type]` with its meaning and a function of the plan, or `Derived[type]` with a function of the
engine, for what depends on the model, too.  A getter of something that zengine does not
have returns what is true here: it is off, or always so.  `DeepSpeedEngine` (deepspeed_engine.py) adds the other
names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, Generic, TypeVar, final, overload

import torch

from zengine.config import Plan
from zengine.engine.engine import Engine
from zprecision import DynamicScaling, StaticScaling

__all__ = ["PlanGetters", "Setting"]

T = TypeVar("T")


class Setting(Generic[T]):
    """Method of an engine without arguments that reads its plan."""

    def __init__(self, doc: str, read: Callable[[Plan], T]) -> None:
        self.__doc__ = doc
        self.read = read

    @overload
    def __get__(self, engine: None, owner: type) -> Setting[T]: ...
    @overload
    def __get__(self, engine: PlanGetters, owner: type) -> Callable[[], T]: ...
    def __get__(self, engine: PlanGetters | None, owner: type) -> Setting[T] | Callable[[], T]:
        return self if engine is None else lambda: self.value(engine)

    def value(self, engine: PlanGetters) -> T:
        """Return the value of an engine."""
        return self.read(engine.plan)


@final
class Derived(Setting[T]):
    """Method of an engine without arguments that reads its parts."""

    def __init__(self, doc: str, find: Callable[[PlanGetters], T]) -> None:
        self.__doc__ = doc
        self.find = find

    def value(self, engine: PlanGetters) -> T:
        return self.find(engine)


def _never(doc: str) -> Setting[bool]:
    """Return the setting of something that zengine does not have."""
    return Setting(doc, lambda p: False)


def _written(plan: Plan, *path: str) -> dict[str, Any]:
    """Return a section of the config as it was written; empty without it."""
    found: Any = plan.given
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return dict(found) if isinstance(found, Mapping) else {}


def _dynamic_loss_args(plan: Plan) -> dict[str, Any] | None:
    rule = plan.scaling
    if not isinstance(rule, DynamicScaling):
        return None
    return {
        "init_scale": rule.initial,
        "scale_window": rule.window,
        "delayed_shift": rule.hysteresis,
        "consecutive_hysteresis": rule.consecutive_hysteresis,
        "min_scale": rule.floor,
    }


def _largest_bucket(engine: PlanGetters) -> int:
    """Return the elements of the largest bucket."""
    return max((bucket.numel for bucket in engine.parts.partition.layout.buckets), default=0)


def _offload_section(engine: PlanGetters, name: str) -> Any:
    """Return a section about offload: DeepSpeed's object, or one with the resolved values."""
    if engine._deepspeed is not None:
        return getattr(engine._deepspeed.config.zero_config, name)
    is_off = engine.plan.offloads.get(name, "none") == "none"
    return None if is_off else SimpleNamespace(**engine.plan.get(f"zero_optimization.{name}"))


class PlanGetters(Engine):
    """Engine with DeepSpeed's getters of its config."""

    _deepspeed: Any = None  # EngineObjects, if `deepspeed.initialize` made the engine

    # -- batches -------------------------------------------------------------------------------------

    train_batch_size = Setting[int]("Samples of a step, over all replicas.", lambda p: p.batch.train_batch_size)
    train_micro_batch_size_per_gpu = Setting[int](
        "Samples of a forward on one rank.", lambda p: p.batch.micro_batch_size
    )
    gradient_accumulation_steps = Setting[int]("Micro-steps of a step.", lambda p: p.batch.accumulation)
    get_batch_info = Setting[tuple[int, int, int]](
        "(train batch size, micro-batch size, accumulation).",
        lambda p: (p.batch.train_batch_size, p.batch.micro_batch_size, p.batch.accumulation),
    )
    managed_gradient_accumulation = Setting[bool](
        "The engine finds the boundaries; False: every step() is one.", lambda p: p.managed_accumulation
    )

    # -- gradients -----------------------------------------------------------------------------------

    gradient_clipping = Setting[float]("Global norm that gradients are clipped to; 0 = off.", lambda p: p.clip_norm)
    gradient_predivide_factor = Setting[float](
        "Divisor of gradients before they are summed.", lambda p: p.zero.averaging.predivide
    )
    prescale_gradients = Setting[bool](
        "Gradients are divided by the replicas before they are summed.", lambda p: p.zero.averaging.prescale
    )
    sparse_gradients_enabled = Setting[bool](
        "Sparse embeddings exchange rows.", lambda p: p.zero.sparse_gradients.value == "rows"
    )
    postscale_gradients = Setting[bool](
        "Gradients are divided by the replicas after they are summed.", lambda p: not p.zero.averaging.prescale
    )

    # -- optimizer and schedule ----------------------------------------------------------------------

    optimizer_params = Setting[dict[str, Any]](
        "Options of the config's optimizer.", lambda p: dict(p.optimizer.params)
    )
    scheduler_name = Setting[str | None](
        "The config's schedule; None: the caller's, or none.", lambda p: p.scheduler.type or None
    )
    scheduler_params = Setting[dict[str, Any]](
        "Options of the config's schedule.", lambda p: dict(p.scheduler.params)
    )
    optimizer_legacy_fusion = _never("The old fused step is used: never.")

    # -- precision -----------------------------------------------------------------------------------

    fp16_enabled = Setting[bool]("Parameters are float16.", lambda p: p.precision.param == torch.float16)
    bfloat16_enabled = Setting[bool]("Parameters are bfloat16.", lambda p: p.precision.param == torch.bfloat16)
    fp16_auto_cast = Setting[bool](
        "Floating inputs of forward are cast to the parameters' dtype.", lambda p: p.cast_inputs
    )
    fp16_master_weights_and_gradients = Setting[bool](
        "The optimizer updates float16 weights themselves.", lambda p: p.precision.master == torch.float16
    )
    bf16_master_weights_and_gradients = Setting[bool](
        "The optimizer updates bfloat16 weights themselves.", lambda p: p.precision.master == torch.bfloat16
    )
    bf16_optimizer_states = Setting[bool](
        "Optimizer states in bfloat16 are requested for such masters.", lambda p: p.numerics.narrow_states
    )
    amp_enabled = Setting[bool](
        "The amp section is on; torch.autocast implements it.", lambda p: bool(p.numerics.amp_level)
    )
    torch_autocast_enabled = Setting[bool](
        "Forward runs under torch.autocast.", lambda p: p.numerics.autocast != torch.float32
    )
    torch_autocast_dtype = Setting[torch.dtype | None](
        "Lower dtype of torch.autocast; None without it.",
        lambda p: None if p.numerics.autocast == torch.float32 else p.numerics.autocast,
    )
    torch_autocast_lower_precision_safe_modules = Setting[list[str]](
        "Classes whose parameters' gradients are reduced in the lower dtype.", lambda p: list(p.zero.narrow_classes)
    )
    loss_scale = Setting[float](
        "The config's constant loss scale; 0: dynamic, or none. The present one is `current_loss_scale`.",
        lambda p: p.scaling.factor if isinstance(p.scaling, StaticScaling) else 0.0,
    )
    dynamic_loss_scale = Setting[bool]("The loss scale moves.", lambda p: isinstance(p.scaling, DynamicScaling))
    initial_dynamic_scale = Setting[float](
        "First factor of a dynamic loss scale; 1 without one.",
        lambda p: p.scaling.initial if isinstance(p.scaling, DynamicScaling) else 1.0,
    )
    dynamic_loss_scale_args = Setting[dict[str, Any] | None](
        "Rule of a dynamic loss scale, by DeepSpeed's names; None without one.", _dynamic_loss_args
    )

    # -- ZeRO ----------------------------------------------------------------------------------------

    zero_optimization_stage = Setting[int]("ZeRO stage.", lambda p: p.zero.stage)
    zero_optimization = Setting[bool]("Something is sharded.", lambda p: p.zero.stage > 0)
    zero_optimization_partition_gradients = Setting[bool]("Gradients are sharded.", lambda p: p.zero.stage >= 2)
    zero_optimization_partition_weights = Setting[bool]("Weights are sharded.", lambda p: p.zero.stage >= 3)
    zero_offload_optimizer = Derived[Any](
        "The section `offload_optimizer`; None without it.", lambda e: _offload_section(e, "offload_optimizer")
    )
    zero_offload_param = Derived[Any](
        "The section `offload_param`; None without it.", lambda e: _offload_section(e, "offload_param")
    )
    zero_cpu_offload = Setting[bool](
        "Optimizer states are on the host.", lambda p: p.offloads.get("offload_optimizer", "none") == "cpu"
    )
    zero_overlap_comm = Setting[bool]("Reductions overlap with backward.", lambda p: p.zero.overlap)
    zero_ignore_unused_parameters = Setting[bool](
        "Parameters without a gradient are no error.", lambda p: p.zero.ignore_unused
    )
    zero_reduce_bucket_size = Derived[int](
        "Elements of a bucket, at most; those of the largest one if the config sets no limit.",
        lambda e: e.plan.zero.bucket_numel or _largest_bucket(e),
    )
    zero_prefetch_bucket_size = Setting[int]("Elements gathered ahead at stage 3.", lambda p: p.zero.prefetch_numel)
    zero_param_persistence_threshold = Setting[int](
        "Parameters of fewer elements stay whole at stage 3.", lambda p: p.zero.persist_numel
    )
    zero_model_persistence_threshold = Setting[int](
        "Elements of all such parameters, at most.", lambda p: p.zero.persist_total_numel
    )
    zero_max_live_parameters = Setting[int](
        "Elements that may stay gathered after forward; by default none.", lambda p: p.zero.max_live_numel or 0
    )
    zero_max_reuse_distance = Setting[int](
        "Elements between two uses that keep a weight whole.", lambda p: p.zero.max_reuse_numel
    )
    zero_use_cpu_optimizer = Setting[bool](
        "Optimizer states are on the host or in files.",
        lambda p: p.offloads.get("offload_optimizer", "none") != "none",
    )
    zero_nvme_offload_optimizer = Setting[bool](
        "Optimizer states are in files.", lambda p: p.offloads.get("offload_optimizer", "none") == "nvme"
    )
    zero_partial_offload = Setting[float]("Share of the states that is offloaded.", lambda p: p.zero.offload.ratio)
    super_offload = Setting[bool](
        "The host updates before the norm is known.", lambda p: p.zero.offload.speculation.value != "off"
    )
    cpuadam_cores_perc = Setting[float](
        "Share of the cores for such an update; 0: torch's threads.", lambda p: p.zero.offload.core_share
    )
    zero_sub_group_size = Derived[int](
        "Elements of an offloaded update; by default those of the largest bucket.",
        lambda e: e.plan.zero.offload.step_numel or _largest_bucket(e),
    )
    zero_allgather_bucket_size = Derived[int](
        "Elements of a message of updated weights; by default those of the largest bucket.",
        lambda e: e.plan.zero.gather_numel or _largest_bucket(e),
    )
    zero_module_granularity_threshold = Setting[int](
        "Elements of the modules that stage 3 gathers together; 0: from the model's size.",
        lambda p: p.zero.unit_numel,
    )
    zero_hpz_partition_size = Setting[int](
        "Ranks that keep a second copy of the weights; 1: none.", lambda p: max(1, p.zero.secondary_group_size)
    )
    zero_quantized_weights = Setting[bool]("Weights are gathered in 8 or 4 bits.", lambda p: p.zero.weight_bits > 0)
    zero_quantized_nontrainable_weights = Setting[bool](
        "Frozen weights are gathered in 8 or 4 bits.", lambda p: p.zero.frozen_weight_bits > 0
    )
    zero_quantized_gradients = Setting[bool](
        "Gradients are reduced in 8 or 4 bits.", lambda p: p.zero.gradient_bits > 0
    )
    zero_load_from_fp32_weights = Setting[bool]("Loads restore masters in float32.", lambda p: p.loads_full_masters)
    is_first_weights_partition_group = Setting[bool](
        "As zero_optimization_partition_weights.", lambda p: p.zero.stage >= 3
    )
    zero_reduce_scatter = Setting[bool]("Sharded gradients are reduce-scattered: always.", lambda p: True)
    zero_contiguous_gradients = Setting[bool]("Gradients are views of buckets: always.", lambda p: True)
    zero_allgather_partitions = Setting[bool]("Updated weights are all-gathered: always.", lambda p: True)
    zero_compute_grad_norm = Setting[bool]("Each boundary computes the norm: always.", lambda p: True)
    zero_allow_untested_optimizer = Setting[bool]("Every torch optimizer is accepted.", lambda p: True)
    zero_force_ds_cpu_optimizer = _never("Offload requires DeepSpeedCPUAdam: never.")
    zero_elastic_checkpoint = Setting[bool]("Optimizer states load at any number of ranks: always.", lambda p: True)
    zero_round_robin_gradients = _never("Gradients are dealt to ranks in turn: never.")
    zero_multi_rank_bucket_allreduce = Setting[bool](
        "A bucket has the gradients of several ranks: always.", lambda p: True
    )
    zero_legacy_stage1 = _never("Stage 1 of DeepSpeed 0.3: never.")
    zero_allgather_sequential = _never("Weights are gathered one by one: never.")
    zero_log_trace_cache_warnings = _never("There is no cache of traces.")
    zero_save_muon_momentum_buffer_in_memory = _never("Muon's momentum is a state as others.")
    zero_parameter_alignment = Setting[int | None]("Alignment of parameters in buckets: none.", lambda p: None)
    is_sanity_checks_enabled = _never("Stage 3 has no other checks to switch on.")
    zenflow_config = Setting[Any](
        "The section zero_optimization.zenflow; None while it is off.",
        lambda p: p.zenflow if p.zenflow.topk_ratio else None,
    )
    aio_config = Setting[dict[str, Any]]("Resolved values of the section.", lambda p: dict(p.get("aio", {})))
    swap_tensor_config = Setting[dict[str, Any]]("Resolved values of `aio`.", lambda p: dict(p.get("aio", {})))

    # -- parallelism ---------------------------------------------------------------------------------

    autotp_size = Setting[int]("Ranks that split the layers of one model.", lambda p: p.parallel.degrees.tensor)
    tensor_parallel_config = Setting[dict[str, Any]](
        "The section, as written.", lambda p: _written(p, "tensor_parallel")
    )
    compile_zero_optimization_stage = compile_autosp = compile_autotp = _never("There is no DeepCompile.")
    uses_parallelization_pass_only = is_deepcompile_enabled = is_deepcompile_active = compile_autotp

    # -- checkpoints ---------------------------------------------------------------------------------

    checkpoint_tag_validation_enabled = Setting[bool](
        "Ranks compare the tags of checkpoints.", lambda p: p.checkpoint.tag_validation != "IGNORE"
    )
    checkpoint_tag_validation_fail = Setting[bool](
        "Different tags are an error.", lambda p: p.checkpoint.tag_validation == "FAIL"
    )
    checkpoint_serialization_enabled = Setting[bool]("Files are in one serialization: always.", lambda p: True)
    checkpoint_writer_enabled = Setting[bool]("A background writer saves.", lambda p: p.checkpoint.async_save)
    load_universal_checkpoint = Setting[bool](
        "Only universal folders load: never; each load recognizes its folder.", lambda p: False
    )
    use_node_local_storage = _never("Each host has its own folder: never.")

    # -- data ----------------------------------------------------------------------------------------

    dataloader_drop_last = Setting[bool]("The last, partial batch is left out.", lambda p: p.data.drop_last)
    curriculum_enabled_legacy = Setting[bool](
        "The section `curriculum_learning` is on.", lambda p: bool(p.data.seqlen)
    )
    curriculum_learning_enabled = Setting[bool]("The curriculum over samples is on.", lambda p: bool(p.data.metrics))
    random_ltd_enabled = Setting[bool]("Random-LTD is on.", lambda p: bool(p.data.ltd))
    data_efficiency_enabled = Setting[bool](
        "The section is on.", lambda p: bool(_written(p, "data_efficiency").get("enabled", False))
    )
    data_efficiency_config = Setting[dict[str, Any]](
        "The section, as written.", lambda p: _written(p, "data_efficiency")
    )
    data_sampling_enabled = Setting[bool](
        "A curriculum or dynamic batching is on.", lambda p: bool(p.data.metrics or p.data.packing)
    )
    data_sampling_config = Setting[dict[str, Any]](
        "The section, as written.", lambda p: _written(p, "data_efficiency", "data_sampling")
    )
    curriculum_learning_config = Setting[dict[str, Any]](
        "The section, as written.", lambda p: _written(p, "data_efficiency", "data_sampling", "curriculum_learning")
    )
    curriculum_params_legacy = Setting[dict[str, Any]](
        "The section `curriculum_learning`, as written.", lambda p: _written(p, "curriculum_learning")
    )
    random_ltd_config = Setting[dict[str, Any]](
        "The section, as written.", lambda p: _written(p, "data_efficiency", "data_routing", "random_ltd")
    )

    # -- measuring -----------------------------------------------------------------------------------

    steps_per_print = Setting[int]("Steps between console lines; 0 = never.", lambda p: p.telemetry.steps_per_print)
    wall_clock_breakdown = Setting[bool]("Phases are timed.", lambda p: p.telemetry.wall_clock_breakdown)
    memory_breakdown = Setting[bool]("Memory is read at each phase.", lambda p: p.telemetry.memory_breakdown)
    dump_state = Setting[bool]("The plan was printed at start.", lambda p: p.dump_state)
    log_level = Setting[str | None]("Level of the log, if the config sets it.", lambda p: p.log_level or None)
    flops_profiler_enabled = Setting[bool]("One step's FLOPs are counted.", lambda p: p.profiling.flops.enabled)
    flops_profiler_recompute_fwd_factor = Setting[float](
        "Forward passes that backward repeats.", lambda p: p.profiling.flops.recompute_fwd_factor
    )
    flops_profiler_profile_step = Setting[int](
        "Steps before the profiled one.", lambda p: p.profiling.flops.profile_step
    )
    flops_profiler_module_depth = Setting[int](
        "Deepest level of modules in the table; -1: all.", lambda p: p.profiling.flops.module_depth
    )
    flops_profiler_top_modules = Setting[int]("Classes listed per level.", lambda p: p.profiling.flops.top_modules)
    flops_profiler_detailed = Setting[bool]("Every module has a line.", lambda p: p.profiling.flops.detailed)
    flops_profiler_output_file = Setting[str | None](
        "File of the table; None: the standard output.", lambda p: p.profiling.flops.output_file or None
    )
    tensorboard_enabled = Setting[bool]("TensorBoard has charts.", lambda p: p.telemetry.tensorboard.enabled)
    wandb_enabled = Setting[bool]("Weights & Biases has charts.", lambda p: p.telemetry.wandb.enabled)
    csv_monitor_enabled = Setting[bool]("CSV files have the scalars.", lambda p: p.telemetry.csv_monitor.enabled)
    autotuning_enabled = Setting[bool]("The script obeys `deepspeed --autotuning`.", lambda p: p.autotuning.enabled)
    autotuning_profile_model_info = Setting[bool](
        "The first forward writes the model's sizes and ends the script.",
        lambda p: p.autotuning.enabled and bool(p.autotuning.model_info_path),
    )
    autotuning_start_profile_step = Setting[int](
        "Steps before the profiled ones.", lambda p: p.autotuning.start_profile_step
    )
    autotuning_end_profile_step = Setting[int]("Last profiled step.", lambda p: p.autotuning.end_profile_step)
    autotuning_metric = Setting[str]("What the best config has most of.", lambda p: p.autotuning.metric)
    autotuning_metric_path = Setting[str]("File of the figures.", lambda p: p.autotuning.metric_path)
    autotuning_model_info_path = Setting[str]("File of the model's sizes.", lambda p: p.autotuning.model_info_path)
    pld_enabled = Setting[bool]("Layers are skipped in training.", lambda p: p.progressive_layer_drop.enabled)
    pld_theta = Setting[float](
        "Theta of progressive layer drop, in the limit.", lambda p: p.progressive_layer_drop.theta
    )
    pld_gamma = Setting[float]("Rate at which theta falls.", lambda p: p.progressive_layer_drop.gamma)
    pld_params = Setting[dict[str, Any]](
        "Section progressive_layer_drop.", lambda p: _written(p, "progressive_layer_drop")
    )
    eigenvalue_enabled = Setting[bool]("Eigenvalues are computed.", lambda p: p.eigenvalues.enabled)
    eigenvalue_verbose = Setting[bool]("They are logged.", lambda p: p.eigenvalues.verbose)
    eigenvalue_max_iter = Setting[int]("Most products for a block.", lambda p: p.eigenvalues.max_iter)
    eigenvalue_tol = Setting[float]("Change at which they stop.", lambda p: p.eigenvalues.tol)
    eigenvalue_stability = Setting[float]("Added to norms.", lambda p: p.eigenvalues.stability)
    eigenvalue_gas_boundary_resolution = Setting[int](
        "Steps from one computation to the next.", lambda p: p.eigenvalues.gas_boundary_resolution
    )
    eigenvalue_layer_name = Setting[str]("List of the blocks.", lambda p: p.eigenvalues.layer_name)
    eigenvalue_layer_num = Setting[int]("Number of blocks; 0: all.", lambda p: p.eigenvalues.layer_num)

    @property
    def block_eigenvalue(self) -> dict[int, tuple[float, int]] | None:
        """Newest eigenvalues: id of a parameter -> (relative value, number of its block); None if they are off."""
        if not self.plan.eigenvalues.enabled:
            return None
        from zengine.features.eigenvalues import Eigenvalues

        return next(each.by_parameter() for each in self._features if isinstance(each, Eigenvalues))

    def quantize_training(self) -> tuple[bool, bool, int, bool, float, str, str, bool, bool]:
        """Return how weights are rounded in training, of compression_training or quantize_training.

        (in forward, enabled, groups, mixed with full precision, fall of its share a step, type, rounding, verbose, by
        a kernel of DeepSpeed's).
        """
        moq, shared = self.plan.moq, self.plan.compression_training.weight_quantization.shared_parameters
        if moq.groups or not shared.enabled:
            mixed = moq.change_ratio > 0
            ratio = moq.change_ratio if mixed else shared.fp16_mixed_quantize.quantize_change_ratio
            return (
                *(False, bool(moq.groups), moq.num_groups, mixed, ratio),
                *(moq.kind, moq.rounding, moq.verbose, False),
            )
        share = shared.fp16_mixed_quantize
        return (
            *(True, True, shared.quantize_groups, share.enabled, share.quantize_change_ratio),
            *(shared.quantization_type, shared.rounding, shared.quantize_verbose, False),
        )

    quantize_training_enabled = Setting[bool]("Weights are rounded after updates.", lambda p: bool(p.moq.groups))
    elasticity_enabled = Setting[bool]("The batch size is elastic.", lambda p: p.elasticity.enabled)
