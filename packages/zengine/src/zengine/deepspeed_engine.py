"""DeepSpeed's names on an engine: a table over the public nouns of `Engine`.

    engine.global_steps                        # an attribute: engine.clock.steps
    engine.train_batch_size()                  # a setting: engine.plan.batch.train_batch_size
    engine.save_16bit_model("out")             # a verb: zengine.checkpoint.export

A row of the table is `Value[type]` for an attribute, or a method with DeepSpeed's signature whose body is a call; the
getters of the config are in deepspeed_getters.py.  These names hide attributes of the module with the same name
(packages/zengine/DEEPSPEED.md lists them); other names reach the module.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, overload

import attrs
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import zcomm
import zpartition
from zengine.build import compile, loaders
from zengine.build.trainable import dtype_of
from zengine.checkpoint import export
from zengine.checkpoint.recovery_script import make_executable, write_recovery_script
from zengine.config import Plan
from zengine.data.loaders.base import Loader, PostProcess
from zengine.deepspeed_getters import PlanGetters
from zengine.engine import accumulation
from zengine.engine.clock import Boundary, Sync
from zengine.engine.parts import ConstantRate, Run, TelemetrySlot
from zengine.features.curriculum import SeqlenCurriculum
from zengine.features.layer_drop import LayerDrop
from zengine.flops.feature import FlopsProfiling
from zengine.flops.profiler import FlopsProfiler
from zengine.imports import is_imported, is_pipeline

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


@attrs.frozen(kw_only=True)
class ClientObjects:
    """Objects that the caller of `initialize` passed; None for those he did not."""

    optimizer: Any = None  # or a function of the parameters
    scheduler: Any = None  # or a function of the optimizer
    mpu: Any = None


class DeepSpeedEngine(PlanGetters):
    """Engine with DeepSpeed's names; `zengine.initialize` returns one."""

    _client = ClientObjects()  # `initialize` replaces it

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
        """Return True if the last `step` changed the weights; False between boundaries."""
        return bool(self.last_report) and self.clock.index == 0

    def get_global_grad_norm(self) -> float | None:
        """Return the gradient norm of the last boundary, before clipping, unscaled; None before the first."""
        return None if self.last_report is None else self.last_report.grad_norm

    # -- parts -----------------------------------------------------------------------------------

    config = Value[Plan]("Resolved plan; the module's own `config` is `engine.module.config`.", lambda e: e.plan)
    optimizer = Value[torch.optim.Optimizer | None]("Optimizer over this rank's shards.", lambda e: e._run.optimizer)
    training_dataloader = Value[Any]("Loader of training_data; None without it.", lambda e: e.parts.loader)
    collate_fn = Value[Callable[[list[Any]], Any] | None](
        "Function that joins samples to a batch; None without training_data.",
        lambda e: None if e.parts.loader is None else e.parts.loader.collate_fn,
    )
    monitor = Value[TelemetrySlot](
        'Charts on rank 0: `engine.monitor.write_events([("eval/loss", 1.5, engine.global_samples)])`.',
        lambda e: e.parts.telemetry,
    )

    tput_timer = Value[Any](
        "DeepSpeed's ThroughputTimer over the engine's steps; None if `zengine.initialize` made the engine.",
        lambda e: next((each.throughput_timer for each in e._features if hasattr(each, "throughput_timer")), None),
    )
    timers = Value[Any](
        "Timers of the phases, by DeepSpeed's names; they run with wall_clock_breakdown.  None like tput_timer.",
        lambda e: e._deepspeed and e._deepspeed.timers,
    )
    engine_timers = Value[Any](
        "Names of those timers by phase, for micro-steps and steps; None like tput_timer.",
        lambda e: e._deepspeed and e._deepspeed.engine_timers,
    )
    _config = Value[Any](
        "The config as a DeepSpeedConfig; None like tput_timer.", lambda e: e._deepspeed and e._deepspeed.config
    )
    client_optimizer = Value[Any](
        "The caller's optimizer or function; None without it.", lambda e: e._client.optimizer
    )
    client_lr_scheduler = Value[Any](
        "The caller's schedule or function; None without it.", lambda e: e._client.scheduler
    )
    basic_optimizer = Value[torch.optim.Optimizer | None]("`optimizer`: there is no wrapper.", lambda e: e.optimizer)
    mpu = Value[Any]("The caller's `mpu`; None without it.", lambda e: e._client.mpu)
    param_names = Value[dict[nn.Parameter, str]](
        "Names of the module's parameters.", lambda e: {each: name for name, each in e.module.named_parameters()}
    )

    flops_profiler = Value[FlopsProfiler | None](
        "Profiler of the section `flops_profiler`, with `flops`, `macs` and `params` of the profiled forward; None "
        "without it, and in pipelines.",
        lambda e: next((each.profiler for each in e._features if isinstance(each, FlopsProfiling)), None),
    )

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Return the milliseconds of the phases of the last step, by timer; empty without wall_clock_breakdown."""
        return dict(self._deepspeed.elapsed) if self._deepspeed else {}

    @property
    def lr_scheduler(self) -> Any:
        """Learning-rate schedule; None without one.

        `step` advances the schedule that is set here, and checkpoints hold its state.  Set None to advance your
        schedule yourself.
        """
        return self.parts.client_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, schedule: Any) -> None:
        chosen = ConstantRate() if schedule is None else schedule
        parts = attrs.evolve(self.parts, scheduler=chosen, client_scheduler=schedule)
        self._run = attrs.evolve(self._run, parts=parts)

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

    seq_data_parallel_group = Value[ProcessGroup | None](
        "Process group of the ranks that sum gradients.", lambda e: e.parts.groups.gradient()
    )
    seq_dp_world_size = Value[int]("Ranks that sum gradients.", lambda e: e.plan.parallel.gradient_ranks)
    data_parallel_group = Value[ProcessGroup | None](
        "Process group of the replicas.", lambda e: e.parts.groups.data()
    )
    mp_world_size = Value[int](
        "Ranks that split the layers of one model.", lambda e: len(e.parts.groups.ranks("tensor"))
    )
    expert_parallel_group = Value[dict[str, ProcessGroup | None]](
        'Process groups that shard experts, by name: {"ep_size_2": group}; empty without MoE layers.',
        lambda e: {name: e.parts.groups.experts() for name in _expert_group_names(e)},
    )
    expert_data_parallel_group = Value[dict[str, ProcessGroup | None]](
        "Process groups of the ranks that hold the same experts, by those names.",
        lambda e: {name: e.parts.groups.expert_data() for name in _expert_group_names(e)},
    )
    dist_backend = Value[str | None](
        "Backend of the process groups; None in one process.",
        lambda e: torch.distributed.get_backend() if torch.distributed.is_initialized() else None,
    )
    has_moe_layers = Value[bool]("The module has MoE layers.", lambda e: bool(_moe_layers(e.module)))
    num_experts = Value[list[int]](
        "Experts of each MoE layer.", lambda e: [int(each.num_experts) for each in _moe_layers(e.module)]
    )
    pipeline_parallelism = Value[bool]("The module is a PipelineModule.", lambda e: is_pipeline(e.module))

    def get_sequence_parallel_group(self) -> ProcessGroup | None:
        """Return `seq_parallel_group`."""
        return self.seq_parallel_group

    def get_data_parallel_rank(self) -> int:
        """Return this rank's index among the replicas."""
        groups = self.parts.groups
        return groups.ranks("replicate", "shard").index(groups.rank)

    def get_model_parallel_rank(self) -> int:
        """Return this rank's index among the ranks that split the layers."""
        return self.parts.groups.ranks("tensor").index(self.parts.groups.rank)

    get_tensor_parallel_rank = get_model_parallel_rank

    def all_gather_scalar(self, value: Tensor, dp_group: ProcessGroup | None) -> list[Tensor]:
        """Return `value` of each rank of `dp_group`; it has the same shape on all of them, which all call."""
        gathered = value.new_empty(zcomm.group_size(dp_group) * value.numel())
        zcomm.all_gather(gathered, value.detach().reshape(-1).contiguous(), dp_group, label="all_gather_scalar")
        return [each.view(value.shape) for each in gathered.chunk(zcomm.group_size(dp_group))]

    # -- batches and accumulation ----------------------------------------------------------------

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

    def coalesce_grad_reduction(self) -> AbstractContextManager[None]:
        """Reduce the sum of several backwards once, at the end of the block.  Costs the memory of `no_sync`."""
        return accumulation.coalesce_grad_reduction(self._run)

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Reduce the gradients that are still local to this rank (after `no_sync`, or a plain backward).

        All ranks call.  bucket_size: ignored; the partition has its own buckets.
        """
        accumulation.reduce_gradients(self._run)

    @property
    def gradient_average(self) -> bool:
        """True if gradients are the mean over ranks, False if they are the sum.  Can be set, by all ranks.

        Raises RuntimeError if parameters have gradients, which were divided already.
        """
        return self.parts.partition.policy.averaging.operation == "mean"

    @gradient_average.setter
    def gradient_average(self, is_mean: bool) -> None:
        if is_mean != self.gradient_average:
            chosen = self.plan.zero.averaging
            if (chosen.operation == "mean") is not is_mean:
                chosen = zpartition.Averaging(operation="mean" if is_mean else "sum")
            self.parts.partition.average(chosen)

    inside_no_sync_ctxt = Value[bool]("A `no_sync` block is open.", lambda e: e.clock.sync is Sync.LOCAL)

    # -- optimizer and schedule ------------------------------------------------------------------

    def optimizer_name(self) -> str | None:
        """Return the class of the caller's optimizer, else the config's name of it; None if neither has one."""
        is_given = self._client.optimizer is not None
        return type(self.optimizer).__name__ if is_given else self.plan.optimizer.type or None

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

    communication_data_type = Value[torch.dtype](
        "Dtype in which most gradients are reduced.", lambda e: e.plan.precision.reduce or dtype_of(e.module)
    )

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtypes of the parameters and of the gradient accumulators."""
        param = self.plan.precision.param or dtype_of(self.module)
        return param, self.plan.zero.accumulate_for(param)

    # -- ZeRO ------------------------------------------------------------------------------------

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

    def train(self, mode: bool = True) -> DeepSpeedEngine:
        """Set the module to training or evaluation; all ranks call.

        A change frees the weights that stage 3 keeps gathered, so that what was written into `param.ds_tensor` is
        used.
        """
        if mode is not self.training:
            self.parts.partition.unsharder.release_all()
        super().train(mode)
        return self

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

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """Names of the weights of embeddings, if their gradients are reduced as sparse tensors; else none."""
        if not self.sparse_gradients_enabled():
            return set()
        kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
        return {f"{name}.weight" for name, child in self.module.named_modules() if isinstance(child, kinds)}

    @property
    def checkpoint_engine(self) -> Any:
        """A TorchCheckpointEngine, for single files of the caller; `save_checkpoint` does not use it."""
        from zengine.checkpoint.single_files import TorchCheckpointEngine

        return TorchCheckpointEngine()

    def _copy_recovery_script(self, save_path: str) -> None:
        """Write `zero_to_fp32.py` into a folder of checkpoints; `deepspeed.initialize` lets saves do so."""
        write_recovery_script(save_path)

    def _change_recovery_script_permissions(self, dst: str) -> None:
        """Make the script executable; failures are logged."""
        make_executable(dst)

    def _get_optimizer_ckpt_name(self, checkpoints_path: str, tag: str, expp_rank: int) -> str:
        """Return the path of DeepSpeed's optimizer file of an expert-parallel rank; our checkpoints have none."""
        return os.path.join(checkpoints_path, str(tag), f"expp_rank_{expp_rank}_mp_rank_00_optim_states.pt")

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """Return the weights in their compute dtype on rank 0's CPU; None on other ranks.  All ranks call."""
        return export.consolidated_16bit_state_dict(self._run, trained_only=exclude_frozen_parameters)

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Return True: saves of whole weights work at every stage, whatever the config says."""
        return True

    # -- data ------------------------------------------------------------------------------------

    curriculum_seqlen = Value[int](
        "Tokens of a sequence in the running step, by `curriculum_learning`; 0: no limit (not DeepSpeed's).",
        lambda e: next((each.seqlen for each in e._features if isinstance(each, SeqlenCurriculum)), 0),
    )

    def get_pld_theta(self) -> float | None:
        """Return theta of progressive layer drop in the running step; None if it is off."""
        return next((each.theta for each in self._features if isinstance(each, LayerDrop)), None)

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

    def random_ltd_initialize(self) -> None:
        """Check that random-LTD is on; `initialize` has hooked its layers.  Raises AssertionError (DeepSpeed's)."""
        assert self.random_ltd_enabled(), "random-LTD is off: enable data_efficiency.data_routing.random_ltd"

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: loaders.CustomSchedules) -> None:
        """Set the schedules of curricula with "schedule_type": "custom": functions from the step to a difficulty.

        schedule_func_dict: functions by metric ("seqlen" for `curriculum_learning`), or one function for one metric.

        Raises:
            ValueError: no curriculum is on.
        """
        loaders.set_custom_schedules(self._run, self._features, schedule_func_dict)

    # -- the process -----------------------------------------------------------------------------

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


def _moe_layers(module: nn.Module) -> list[Any]:
    """Return the MoE layers of `module`; nothing is imported for a model without."""
    if not is_imported("zpartition.experts"):
        return []
    from zpartition.experts import MoE

    return [each for each in module.modules() if isinstance(each, MoE)]


def _expert_group_names(engine: DeepSpeedEngine) -> list[str]:
    return [f"ep_size_{engine.parts.groups.expert}"] if engine.has_moe_layers else []
