"""DeepSpeed's names on an engine: a table over the public nouns of `Engine`.

    engine.global_steps                        # an attribute: engine.clock.steps
    engine.train_batch_size()                  # a setting: engine.plan.batch.train_batch_size
    engine.save_16bit_model("out")             # a verb: zengine.checkpoint.export

A row of the table is `Value[type]` for an attribute, `Setting[type]` for a method without arguments, or a method
with DeepSpeed's signature whose body is a call.  These names hide attributes of the module with the same name
(packages/zengine/DEEPSPEED.md lists them); other names reach the module.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zengine.build import compile, loaders
from zengine.build.trainable import dtype_of
from zengine.checkpoint import export
from zengine.config import Plan
from zengine.data.loaders.base import Loader, PostProcess
from zengine.engine import accumulation
from zengine.engine.clock import Boundary
from zengine.engine.engine import Engine
from zengine.engine.parts import Run, TelemetrySlot
from zengine.features.curriculum import SeqlenCurriculum
from zprecision import DynamicScaling, StaticScaling

if TYPE_CHECKING:
    from zpartition.activations import Checkpointing

__all__ = ["DeepSpeedEngine"]

STATES = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")  # of `offload_states`

T = TypeVar("T")


class Value(Generic[T]):
    """Read-only attribute of an engine."""

    def __init__(self, doc: str, read: Callable[[DeepSpeedEngine], T]) -> None:
        self.__doc__ = doc
        self.read = read

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, engine: None, owner: type) -> Value[T]: ...
    @overload
    def __get__(self, engine: DeepSpeedEngine, owner: type) -> T: ...
    def __get__(self, engine: DeepSpeedEngine | None, owner: type) -> Value[T] | T:
        return self if engine is None else self.read(engine)

    def __set__(self, engine: DeepSpeedEngine, value: object) -> NoReturn:
        raise AttributeError(f"engine.{self.name} cannot be set")


class Setting(Generic[T]):
    """Method of an engine without arguments that reads its plan."""

    def __init__(self, doc: str, read: Callable[[Plan], T]) -> None:
        self.__doc__ = doc
        self.read = read

    @overload
    def __get__(self, engine: None, owner: type) -> Setting[T]: ...
    @overload
    def __get__(self, engine: DeepSpeedEngine, owner: type) -> Callable[[], T]: ...
    def __get__(self, engine: DeepSpeedEngine | None, owner: type) -> Setting[T] | Callable[[], T]:
        return self if engine is None else lambda: self.read(engine.plan)


class DeepSpeedEngine(Engine):
    """Engine with DeepSpeed's names; `zengine.initialize` returns one."""

    # -- counters, and the last step -------------------------------------------------------------

    global_steps = Value[int]("Boundaries so far, skipped ones included.", lambda e: e.clock.steps)
    applied_steps = Value[int](
        "Boundaries that changed the weights (not DeepSpeed's).", lambda e: e.clock.applied_steps
    )
    skipped_steps = Value[int]("Boundaries that did not.", lambda e: e.clock.skipped_steps)
    micro_steps = Value[int]("Calls of `step` so far.", lambda e: e.clock.micro_steps)
    global_samples = Value[int]("Samples of all complete steps, over all replicas.", lambda e: e.clock.samples)
    current_loss_scale = Value[float](
        "Factor of the next loss (not DeepSpeed's).", lambda e: float(e.parts.scaler.factor)
    )

    def was_step_applied(self) -> bool:
        """Return True if the last boundary changed the weights."""
        return bool(self.last_report)

    def get_global_grad_norm(self) -> float | None:
        """Return the gradient norm of the last boundary, before clipping, unscaled; None before the first."""
        return None if self.last_report is None else self.last_report.grad_norm

    # -- parts -----------------------------------------------------------------------------------

    config = Value[Plan]("Resolved plan; the module's own `config` is `engine.module.config`.", lambda e: e.plan)
    optimizer = Value[torch.optim.Optimizer | None]("Optimizer over this rank's shards.", lambda e: e._run.optimizer)
    lr_scheduler = Value[Any]("Learning-rate schedule; None without one.", lambda e: e.parts.client_scheduler)
    training_dataloader = Value[Any]("Loader of training_data; None without it.", lambda e: e.parts.loader)
    collate_fn = Value[Callable[[list[Any]], Any] | None](
        "Function that joins samples to a batch; None without training_data.",
        lambda e: None if e.parts.loader is None else e.parts.loader.collate_fn,
    )
    monitor = Value[TelemetrySlot](
        'Charts on rank 0: `engine.monitor.write_events([("eval/loss", 1.5, engine.global_samples)])`.',
        lambda e: e.parts.telemetry,
    )

    @property
    def activation_checkpointing(self) -> Checkpointing:
        """Runs a block by the section of that name: `engine.activation_checkpointing(block, x)` (not DeepSpeed's)."""
        return self.parts.checkpointing()

    # -- ranks -----------------------------------------------------------------------------------

    device = Value[torch.device]("Device of the module.", lambda e: e.parts.world.device)
    global_rank = Value[int]("Rank of this process.", lambda e: e.parts.world.rank)
    local_rank = Value[int]("Rank within this host.", lambda e: e.parts.world.local_rank)
    world_size = Value[int]("Number of processes.", lambda e: e.parts.world.world_size)
    dp_world_size = Value[int]("Data-parallel replicas.", lambda e: e.plan.batch.replicas)
    sequence_parallel_size = Value[int](
        "Ranks that split the tokens of each sample.", lambda e: e.plan.parallel.degrees.sequence
    )
    seq_parallel_group = Value[ProcessGroup | None](
        "Process group of the ranks that split this rank's samples, in token order.",
        lambda e: e.parts.groups.sequence(),
    )
    autotp_size = Setting[int]("Ranks that split the layers of one model.", lambda p: p.parallel.degrees.tensor)

    def get_sequence_parallel_group(self) -> ProcessGroup | None:
        """Return `seq_parallel_group`."""
        return self.seq_parallel_group

    # -- batches and accumulation ----------------------------------------------------------------

    train_batch_size = Setting[int]("Samples of a step, over all replicas.", lambda p: p.batch.train_batch_size)
    train_micro_batch_size_per_gpu = Setting[int](
        "Samples of a forward on one rank.", lambda p: p.batch.micro_batch_size
    )
    gradient_accumulation_steps = Setting[int]("Micro-steps of a step.", lambda p: p.batch.accumulation)
    get_batch_info = Setting[tuple[int, int, int]](
        "(train batch size, micro-batch size, accumulation).",
        lambda p: (p.batch.train_batch_size, p.batch.micro_batch_size, p.batch.accumulation),
    )

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Set the samples per step from the next step on, by changing only the accumulation.

        Raises:
            ValueError: not a multiple of the samples of one micro-step over all ranks; or called within a step.
        """
        self._run = accumulation.with_train_batch_size(self._run, train_batch_size)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Set the samples per forward from the next step on; the accumulation stays.

        This changes the engine's counts; batches of that size must come from your own loader or a new `deepspeed_io`.

        Raises:
            ValueError: less than 1; or called within a step.
        """
        self._run = accumulation.with_micro_batch_size(self._run, micro_batch_size)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return True if the next `step` updates the weights."""
        return self.clock.at_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Let the next `step`, and later ones, update the weights or not, until the next call of this."""
        self.clock.boundary = Boundary.FORCED if is_boundary else Boundary.WITHHELD

    # -- gradients -------------------------------------------------------------------------------

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

    def coalesce_grad_reduction(self) -> AbstractContextManager[None]:
        """Reduce the sum of several backwards once, at the end of the block.  Costs the memory of `no_sync`."""
        return accumulation.coalesce_grad_reduction(self._run)

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Reduce the gradients that are still local to this rank (after `no_sync`, or a plain backward).

        All ranks call.  bucket_size: ignored; the partition has its own buckets.
        """
        accumulation.reduce_gradients(self._run)

    # -- optimizer and schedule ------------------------------------------------------------------

    optimizer_name = Setting[str | None](
        "The config's optimizer; None: the caller's, or none.", lambda p: p.optimizer.type or None
    )
    optimizer_params = Setting[dict[str, Any]](
        "Options of the config's optimizer.", lambda p: dict(p.optimizer.params)
    )
    scheduler_name = Setting[str | None](
        "The config's schedule; None: the caller's, or none.", lambda p: p.scheduler.type or None
    )
    scheduler_params = Setting[dict[str, Any]](
        "Options of the config's schedule.", lambda p: dict(p.scheduler.params)
    )

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group; 0 for a group without one."""
        return list(self.parts.optimizer.lr())

    def set_lr(self, lr: float | Sequence[float]) -> None:
        """Set the learning rate from the next update on, until a schedule sets its own (not DeepSpeed's).

        lr: one rate for all parameter groups, or a list with a rate for each, as `get_lr` returns it.

        Raises:
            ValueError: the list has another length than the parameter groups, or the optimizer has no learning rate.
        """
        groups = self._groups()
        rates = list(lr) if isinstance(lr, (list, tuple)) else [lr] * len(groups)
        if len(rates) != len(groups):
            raise ValueError(
                f"set_lr() got {len(rates)} learning rates and the optimizer has {len(groups)} parameter groups: "
                "give one rate per group, or a single number for all groups"
            )
        if without := [index for index, group in enumerate(groups) if "lr" not in group]:
            raise ValueError(
                f"set_lr(): {type(self.optimizer).__name__} has no learning rate in its parameter groups {without}"
            )
        for group, rate in zip(groups, rates):
            group["lr"] = rate

    def get_mom(self) -> list[Any]:
        """Return the betas or else the momentum of each parameter group; 0 for a group with neither."""
        return [group.get("betas", group.get("momentum", 0.0)) for group in self._groups()]

    def get_type(self) -> list[Any]:
        """Return the "type" of each parameter group (DeepSpeed's Muon has one); 0 for a group without."""
        return [group.get("type", 0.0) for group in self._groups()]

    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    # -- precision -------------------------------------------------------------------------------

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
    communication_data_type = Value[torch.dtype](
        "Dtype in which most gradients are reduced.", lambda e: e.plan.precision.reduce or dtype_of(e.module)
    )

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtypes of the parameters and of the gradient accumulators."""
        param = self.plan.precision.param or dtype_of(self.module)
        return param, self.plan.zero.accumulate_for(param)

    # -- ZeRO ------------------------------------------------------------------------------------

    zero_optimization_stage = Setting[int]("ZeRO stage.", lambda p: p.zero.stage)
    zero_optimization = Setting[bool]("Something is sharded.", lambda p: p.zero.stage > 0)
    zero_optimization_partition_gradients = Setting[bool]("Gradients are sharded.", lambda p: p.zero.stage >= 2)
    zero_optimization_partition_weights = Setting[bool]("Weights are sharded.", lambda p: p.zero.stage >= 3)
    zero_offload_optimizer = Setting[str](
        'Tier of optimizer states: "none", "cpu" or "nvme".', lambda p: p.offloads.get("offload_optimizer", "none")
    )
    zero_offload_param = Setting[str](
        'Tier of sharded weights: "none", "cpu" or "nvme".', lambda p: p.offloads.get("offload_param", "none")
    )
    zero_cpu_offload = Setting[bool](
        "Optimizer states are on the host.", lambda p: p.offloads.get("offload_optimizer", "none") == "cpu"
    )
    zero_overlap_comm = Setting[bool]("Reductions overlap with backward.", lambda p: p.zero.overlap)
    zero_ignore_unused_parameters = Setting[bool](
        "Parameters without a gradient are no error.", lambda p: p.zero.ignore_unused
    )
    zero_reduce_bucket_size = Setting[int](
        "Elements of a bucket; 0: from the model's size.", lambda p: p.zero.bucket_numel
    )
    zero_prefetch_bucket_size = Setting[int]("Elements gathered ahead at stage 3.", lambda p: p.zero.prefetch_numel)
    zero_param_persistence_threshold = Setting[int](
        "Parameters of fewer elements stay whole at stage 3.", lambda p: p.zero.persist_numel
    )
    zero_model_persistence_threshold = Setting[int](
        "Elements of all such parameters, at most.", lambda p: p.zero.persist_total_numel
    )
    zero_max_live_parameters = Setting[int](
        "Elements that may stay gathered after forward.", lambda p: p.zero.max_live_numel
    )
    zero_max_reuse_distance = Setting[int](
        "Elements between two uses that keep a weight whole.", lambda p: p.zero.max_reuse_numel
    )

    def offload_states(
        self,
        include: Iterable[str] | None = None,
        device: str = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
        nvme_path: str = "",
    ) -> None:
        """Move training state to the host or into files ("nvme") until `reload_states`.  All ranks call.

        include: any of optim_states, hp_params, lp_params, lp_grads, contiguous_grad_buffer; default: all of them.
        non_blocking: ignored; the copies are complete when this returns.

        Raises:
            ValueError: another name or device, or called within a step.
        """
        _offload_states(self._run, include, device, pin_memory=pin_memory, directory=nvme_path)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Restore the states that `offload_states` moved; does nothing if none were.  All ranks call."""
        self.parts.partition.reload_states()

    def empty_partition_cache(self) -> None:
        """Free the weights that stage 3 keeps gathered; their next use gathers them again."""
        self.clock.require_open("empty_partition_cache")
        self.parts.partition.unsharder.release_all()

    # -- weights ---------------------------------------------------------------------------------

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the weights in their compute dtype to one file; return True.  All ranks call.

        save_filename: a name that ends in .safetensors selects that format, any other name torch.save's.

        Raises:
            ValueError: on every rank, if rank 0 cannot write.
        """
        return export.save_16bit_model(self._run, save_dir, save_filename, trained_only=exclude_frozen_parameters)

    save_fp16_model = save_16bit_model  # an old name

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """Return the state dict of the whole module on every rank; all ranks call."""
        return export.module_state_dict(self._run, trained_only=exclude_frozen_parameters)

    def load_module_state_dict(
        self, checkpoint: Mapping[str, Any], strict: bool = True, custom_load_fn: Any = None
    ) -> None:
        """Copy rank 0's weights into the module and the masters; all ranks call.

        checkpoint: a state dict, or DeepSpeed's dict with one under "module".
        custom_load_fn: `f(src=state_dict, dst=module)`, called instead of the copy while the weights are gathered.
        """
        export.load_module_state_dict(self._run, checkpoint, strict=strict, custom_load_fn=custom_load_fn)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """Return the weights in their compute dtype on rank 0's CPU; None on other ranks.  All ranks call."""
        return export.consolidated_16bit_state_dict(self._run, trained_only=exclude_frozen_parameters)

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Return True: saves of whole weights work at every stage, whatever the config says."""
        return True

    checkpoint_tag_validation_enabled = Setting[bool](
        "Ranks compare the tags of checkpoints.", lambda p: p.checkpoint.tag_validation != "IGNORE"
    )
    checkpoint_tag_validation_fail = Setting[bool](
        "Different tags are an error.", lambda p: p.checkpoint.tag_validation == "FAIL"
    )

    # -- data ------------------------------------------------------------------------------------

    dataloader_drop_last = Setting[bool]("The last, partial batch is left out.", lambda p: p.data.drop_last)
    curriculum_enabled_legacy = Setting[bool](
        "The section `curriculum_learning` is on.", lambda p: bool(p.data.seqlen)
    )
    curriculum_learning_enabled = Setting[bool]("The curriculum over samples is on.", lambda p: bool(p.data.metrics))
    random_ltd_enabled = Setting[bool]("Random-LTD is on.", lambda p: bool(p.data.ltd))
    curriculum_seqlen = Value[int](
        "Tokens of a sequence in the running step, by `curriculum_learning`; 0: no limit (not DeepSpeed's).",
        lambda e: next((each.seqlen for each in e._features if isinstance(each, SeqlenCurriculum)), 0),
    )

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> Loader:
        """Return a loader over `dataset`, sharded over the replicas; checkpoints do not contain its position.

        batch_size: samples of this rank; default: the micro-batch size.
        route: "train" shuffles each epoch; "eval" and "predict" keep the order of the dataset.
        data_sampler: yields the indices of this rank's samples; replaces the sharding.
        num_local_io_workers: worker processes; default: data_sampling.num_workers.

        Raises:
            ValueError: `dataset` is not a dataset, or `route` is another word.
        """
        return loaders.user_loader(
            self._run,
            dataset,
            batch_size=batch_size,
            route=route,
            pin_memory=pin_memory,
            data_sampler=data_sampler,
            collate_fn=collate_fn or self.collate_fn,
            num_workers=num_local_io_workers,
        )

    def set_data_post_process_func(self, post_process_func: PostProcess | None) -> None:
        """Make the training loader yield `post_process_func(batch, state)`, where `state` is its position.

        With a curriculum, `state["current_difficulties"]` maps each metric to the difficulty of this batch.

        Raises:
            ValueError: there is no training loader.
        """
        loaders.set_post_process(self._run, post_process_func)

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: loaders.CustomSchedules) -> None:
        """Set the schedules of curricula with "schedule_type": "custom": functions from the step to a difficulty.

        schedule_func_dict: functions by metric ("seqlen" for `curriculum_learning`), or one function for one metric.

        Raises:
            ValueError: no curriculum is on.
        """
        loaders.set_custom_schedules(self._run, self._features, schedule_func_dict)

    # -- the process -----------------------------------------------------------------------------

    steps_per_print = Setting[int]("Steps between console lines; 0 = never.", lambda p: p.telemetry.steps_per_print)
    wall_clock_breakdown = Setting[bool]("Phases are timed.", lambda p: p.telemetry.wall_clock_breakdown)
    memory_breakdown = Setting[bool]("Memory is read at each phase.", lambda p: p.telemetry.memory_breakdown)
    dump_state = Setting[bool]("The plan was printed at start.", lambda p: p.dump_state)

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the module's blocks with torch.compile(backend=..., **compile_kwargs); undone by `close`.

        Raises:
            ValueError: a schedule or compiled autograd, which only DeepSpeed's compiler has, is requested; the
                schedule of the pipeline is zero_bubble; or the module is compiled already.
        """
        unsupported = {"schedule": schedule is not None, "compiled_autograd_enabled": compiled_autograd_enabled}
        compile.check(self._run, unsupported, is_compiled=self.is_compiled)
        self.add_feature(compile.Compiled(backend, compile_kwargs or {}))

    is_compiled = Value[bool](
        "True after `compile`.", lambda e: any(isinstance(each, compile.Compiled) for each in e._features)
    )

    def collect_python_gc(self) -> int:
        """Run the garbage collector, for configs with "disable_python_gc"; return the number of freed objects."""
        return gc.collect()

    def destroy(self) -> None:
        """Call `close`."""
        self.close()


def _offload_states(
    run: Run, include: Iterable[str] | None, device: str, *, pin_memory: bool, directory: str
) -> None:
    names = [str(getattr(each, "value", each)) for each in (STATES if include is None else include)]
    device = str(getattr(device, "value", device))
    unknown = sorted(set(names) - set(STATES))
    if unknown or device not in ("cpu", "nvme") or (device == "nvme" and not directory):
        given = f"include={names}, device={device!r}, nvme_path={directory!r}"
        raise ValueError(
            f'offload_states({given}): include takes {", ".join(STATES)}; device is "cpu", or "nvme" with a nvme_path'
        )
    run.clock.require_open("offload_states")
    run.parts.partition.offload_states(names, pin=pin_memory, directory=directory if device == "nvme" else "")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
