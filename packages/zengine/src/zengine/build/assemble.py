"""Assembly: the parts and features of an engine, chosen by its plan.

This file makes the parts, each once; the engine afterwards calls its slots.  tests/architecture/test_imports.py lists
the other files that may name classes of the five packages.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import zckpt
import zcomm
import zoptim
import zpartition
import zprecision
from zengine import features
from zengine.build.agreement import check_agreement
from zengine.build.expert_parallel import check_experts, distribute_experts
from zengine.build.loaders import check_data, data_features, make_feed, training_loader
from zengine.build.mpu import check_copies
from zengine.build.pipeline import check_mesh
from zengine.build.trainable import (
    check_are_parameters,
    check_class_names,
    check_not_codes,
    read_once,
    trainable_parameters,
    with_names,
)
from zengine.checkpoint.save_load import Checkpoints
from zengine.checkpoint.saver import BackgroundSaver, BlockingSaver, Saver
from zengine.config import Plan
from zengine.config.plan.techniques.compression import forward_techniques
from zengine.config.plan.techniques.zenflow import interval_problem
from zengine.config.plan.zero import selective_policy
from zengine.engine.drift import make_drift
from zengine.engine.feature import Feature
from zengine.engine.nonfinite import OverflowPolicy, SkipNonFinite, apply_always
from zengine.engine.parts import ConstantRate, NoOptimizer, Numbers, OwnStep, Parts, ShardOptimizer, TelemetrySlot
from zengine.engine.runners import (
    AutocastRunner,
    CastingRunner,
    Closable,
    ExplainingRunner,
    InputDtypeRunner,
    Runner,
    RunnerWithCleanup,
    Sequential,
)
from zengine.features.builtin import balancing_features
from zengine.telemetry import make_telemetry

if TYPE_CHECKING:
    from zengine.config.plan.telemetry import FlopsPlan
    from zpartition.pipeline import PipelineRunner

log = logging.getLogger("zengine")

_NARROW = (torch.float16, torch.bfloat16)


@attrs.frozen(kw_only=True, eq=False)
class Client:
    """Objects that the caller of `initialize` passed; None for those that the config describes."""

    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None
    parameters: Iterable[Any] | None = None  # parameters or group dicts of an optimizer to be made
    scheduler: Any = None  # a schedule, or a callable optimizer -> schedule
    training_data: Any = None  # a dataset
    collate_fn: Callable[[list[Any]], Any] | None = None
    mpu: Any = None


def assemble(module: nn.Module, client: Client, plan: Plan, world: zcomm.World, groups: zcomm.Groups) -> Parts:
    """Build every part for `plan`; move `module` to the device, cast it, and partition it over the gradient ranks."""
    check_mesh(module, groups)
    zpartition.reclaim_weights(module)  # of an engine that was dropped
    loader = make_training_loader(client, plan, world, groups)
    check_experts(module, plan)
    pending: tuple[Closable, ...] = ()  # blocks that verify themselves at their first call
    if plan.parallel.degrees.tensor > 1:
        from zengine.build.tensor_parallel import first_batch, split_tensors

        sample = functools.partial(first_batch, client.training_data, client.collate_fn, world.device)
        unverified = split_tensors(module, plan, groups, world.device, sample)
        pending = (unverified,) if unverified.blocks else ()
    distribute_experts(module, plan, groups)
    with zpartition.recording(module):  # for a module without memory; see zpartition.Init
        plan.precision.cast_module(module.to(world.device))
    check_class_names(plan.zero.narrow_classes, module)
    optimizer = make_optimizer(module, client, plan)
    check_agreement(module, optimizer, plan, groups, [] if loader is None else loader.fingerprint())
    if optimizer is not None and hasattr(optimizer, "needs_local_gradients"):
        features.check_compressed_optimizer(optimizer, plan)
    if client.optimizer is not None and optimizer is not None:
        _check_narrow_states(optimizer, plan)
    policy = _with_epochs(plan, loader)
    partition = zpartition.shard(module, optimizer, policy=policy, group=groups.gradient(), device=world.device)
    partition.watch_tensors = zoptim.watch_tensors
    try:
        if plan.parallel.degrees.tensor > 1:
            check_copies(partition, groups)
        parts = _make_parts(partition, loader, client, plan, world, groups)
        return attrs.evolve(parts, runner=RunnerWithCleanup(parts.runner, pending)) if pending else parts
    except BaseException:
        partition.close(keep_weights=False)  # frees the module for another attempt; other ranks may not get here
        raise


def _with_epochs(plan: Plan, loader: Any) -> zpartition.ZeroPolicy:
    """Return the ZeRO policy; selections of ZenFlow that count epochs need the loader's length.

    Raises:
        ValueError: an epoch is shorter than an interval of updates.
    """
    if not plan.zenflow.topk_ratio:
        return plan.zero
    try:
        steps = 0 if loader is None else len(loader) // plan.batch.accumulation
    except TypeError:  # a stream
        steps = 0
    if plan.zenflow.select_strategy != "step" and (problem := interval_problem(plan.zenflow, steps)):
        raise ValueError(f"{problem[0]} (training_data has {steps} steps in an epoch). {problem[1]}")
    selective = selective_policy(plan.zenflow, steps)
    return attrs.evolve(plan.zero, offload=attrs.evolve(plan.zero.offload, selective=selective))


def _make_parts(
    partition: zpartition.Partition,
    loader: Any,
    client: Client,
    plan: Plan,
    world: zcomm.World,
    groups: zcomm.Groups,
) -> Parts:
    """Build the other parts for the partitioned module."""
    optimizer = partition.optimizer
    scaler = zprecision.make_scaler(plan.scaling, world.device)
    scheduler = make_scheduler(optimizer, client, plan)
    slot = NoOptimizer() if optimizer is None else _slot(optimizer)
    if isinstance(slot, ShardOptimizer):  # speculative updates assume no clipping, and do not synchronize
        partition.speculate(slot.scaled, lambda: scaler.factor.float() if divides(plan) else None)
    checkpointing = functools.cache(lambda: _checkpointing(plan, partition.mp_group, world.device))
    with ExitStack() as opened:  # closes parts if a later one cannot be made
        telemetry = _telemetry(plan, world, groups)
        opened.callback(telemetry.close)
        checkpoints = Checkpoints(make_saver(plan, partition, groups.world()))
        opened.callback(checkpoints.close)
        parts = Parts(
            world=world,
            groups=groups,
            partition=partition,
            scaler=scaler,
            optimizer=features.ScaledRate(slot) if plan.data.packing else slot,
            scheduler=ConstantRate() if scheduler is None else scheduler,
            telemetry=telemetry,
            inspect=make_inspect(partition),
            divisor=make_divisor(plan, world.device, dtype=_divisor_dtype(partition.module)),
            drift=make_drift(
                partition, optimizer, groups, functools.partial(zcomm.all_gather_object, group=groups.replica())
            ),
            overflow_policy=make_overflow_policy(plan, scaler, groups.replica()),
            exchange=functools.partial(zcomm.all_gather_object, group=partition.group),
            checkpoints=checkpoints,
            checkpointing=checkpointing,
            loader=loader,
            client_scheduler=scheduler,
            runner=make_runner(plan, partition.module, world.device, checkpointing),  # last: it changes the module
        )
        opened.pop_all()
    return parts


def _checkpointing(
    plan: Plan, mp_group: zpartition.ModelParallelGroup, device: torch.device
) -> zpartition.activations.Checkpointing:
    from zengine.build.activation_checkpointing import make_checkpointing

    return make_checkpointing(plan.activations, mp_group, device)


def _telemetry(plan: Plan, world: zcomm.World, groups: zcomm.Groups) -> TelemetrySlot:
    """Return the telemetry, which measures on rank 0."""
    return make_telemetry(
        plan.telemetry,
        device=world.device,
        rank=world.rank,
        micro_batch_size=plan.batch.micro_batch_size,
        batch_size=plan.batch.train_batch_size,
        replicas=plan.parallel.sample_ranks,
        pieces=plan.parallel.degrees.sequence,
        num_devices=groups.table.size,
    )


def make_features(
    plan: Plan, partition: zpartition.Partition, pipeline: PipelineRunner | None = None
) -> tuple[Feature, ...]:
    """Return the features that the plan and the module ask for, in the order of their hooks.

    A failed background save raises before the step is counted; the step then begins again.
    """
    chosen: list[Feature] = []
    if plan.diloco.sync_every:  # first: the others see the weights after an exchange
        rounds = features.LocalRounds(plan.diloco)
        chosen += [rounds, *([features.GradientsOfAllGroups(rounds)] if plan.diloco.start_step else [])]
    if hasattr(partition.optimizer, "needs_local_gradients"):
        chosen.append(features.CompressedOptimizer())
    chosen += [features.UnevenRows(step) for step in plan.batch.uneven]
    if plan.zenflow.topk_ratio and partition.optimizer is not None:
        chosen.append(features.SelectiveState())
    if plan.parallel.degrees.tensor > 1:
        chosen.append(features.SameBatch(() if pipeline is None else ("inputs", "labels")))
    if partition.frozen_params:
        chosen.append(features.Unfreezing())
    chosen += balancing_features(partition.module)
    if plan.checkpoint.async_save:
        chosen.append(features.BackgroundSaves())
    chosen += data_features(plan.data)
    chosen += technique_features(plan)
    if plan.diloco.sync_every and plan.moq.groups:  # an exchange publishes the weights, which rounds them
        chosen.sort(key=lambda each: not isinstance(each, features.MixtureOfQuantization))
    if plan.dump_state:
        chosen.append(features.DumpState())
    if not plan.collect_garbage:
        chosen.append(features.PythonGC())
    if plan.telemetry.is_wanted:
        chosen.append(features.Measuring())
    if plan.telemetry.gradient_histograms:
        chosen.append(features.LayerNorms(plan.telemetry.gradient_histograms))
    if plan.telemetry.is_wanted and plan.telemetry.rates.count_flops_at:
        chosen.append(features.CountFlops(plan.telemetry.rates.count_flops_at))
    if plan.verify_replicas_every:
        chosen.append(features.VerifyReplicas(plan.verify_replicas_every))
    if plan.autotuning.enabled:
        chosen += features.trial_features(plan.autotuning)
    return (*chosen, *make_profilers(plan, pipeline))


def technique_features(plan: Plan) -> list[Feature]:
    """Return the features that change what is trained, in the order of their hooks."""
    chosen: list[Feature] = []
    if plan.zero.gradient_error_beta < 1:
        chosen.append(features.GradientErrors())
    if plan.compression_training.distillation.enabled:  # before keywords that only the student's forward takes
        chosen.append(features.Teaching(plan.compression_training.distillation))
    if plan.progressive_layer_drop.enabled:
        chosen.append(features.LayerDrop(plan.progressive_layer_drop))
    eigenvalues = features.Eigenvalues(plan.eigenvalues) if plan.eigenvalues.enabled else None
    chosen += [] if eigenvalues is None else [eigenvalues]
    if plan.moq.groups:
        chosen.append(features.MixtureOfQuantization(plan.moq, eigenvalues))
    if forward_techniques(plan.compression_training):
        chosen.append(features.CompressionSchedule(plan.compression_training))
    return chosen


def make_profilers(plan: Plan, pipeline: PipelineRunner | None = None) -> tuple[Feature, ...]:
    """Return the profilers that the plan asks for.  pipeline: runner of an engine with stages."""
    profiling, folder = plan.profiling, _run_folder(plan)
    chosen: list[Feature] = []
    if profiling.comms.enabled:
        from zengine.features.comms_summary import CommsSummary

        chosen.append(CommsSummary(profiling.comms, folder))
    if profiling.flops.enabled:
        chosen.append(_flops_feature(profiling.flops, folder, pipeline))
    if profiling.window.enabled:
        from zengine.features.profiler_window import ProfilerWindow

        window_folder = profiling.window.folder or (folder or Path()) / "profile"
        chosen.append(ProfilerWindow(profiling.window, Path(window_folder)))
    return tuple(chosen)


def _flops_feature(plan: FlopsPlan, folder: Path | None, pipeline: PipelineRunner | None) -> Feature:
    if pipeline is not None:
        from zengine.flops.stage_feature import StageFlops

        return StageFlops(plan, folder, pipeline)
    from zengine.flops.feature import FlopsProfiling

    return FlopsProfiling(plan, folder)


def _run_folder(plan: Plan) -> Path | None:
    """Return the folder of the run's record (`jsonl_monitor`); None if that is off."""
    monitor = plan.telemetry.jsonl_monitor
    if not monitor.enabled:
        return None
    from zengine.telemetry.sinks.table import folder_of

    return folder_of(monitor)


def make_optimizer(module: nn.Module, client: Client, plan: Plan) -> torch.optim.Optimizer | None:
    """Return the caller's optimizer or the config's; None if neither has one.

    Raises:
        ValueError: there is nothing to train.
        TypeError: the caller's function returned something else.
    """
    if isinstance(client.optimizer, torch.optim.Optimizer):
        _warn_unused("optimizer", plan.optimizer.type)
        return client.optimizer
    given = client.parameters
    parameters: list[Any] = trainable_parameters(module) if given is None else read_once(given)
    if not parameters and zpartition.pipeline_stages_of(module).size > 1:
        parameters = [{"params": []}]  # this stage has only functions, or tied weights of another stage
    if not parameters and (client.optimizer is not None or plan.optimizer.type):
        raise ValueError(_nothing_to_train_message(module, client, plan))
    check_are_parameters(parameters)
    check_not_codes(module, parameters)
    if client.optimizer is not None or plan.optimizer.type:
        _warn_all_frozen(module)
    if client.optimizer is not None:
        _warn_unused("optimizer", plan.optimizer.type)
        return _call_maker(client.optimizer, parameters)
    if not plan.optimizer.type:
        return None
    return zoptim.make_optimizer(plan.optimizer.type, with_names(module, parameters), plan.optimizer.params)


def make_scheduler(optimizer: torch.optim.Optimizer | None, client: Client, plan: Plan) -> Any:
    """Return the caller's schedule or the config's; None if neither has one.

    Without an optimizer the config's has no effect: one config serves training and evaluation.

    Raises:
        ValueError: the caller has passed a schedule, but there is no optimizer.
    """
    if client.scheduler is None and not plan.scheduler.type:
        return None
    if optimizer is None and client.scheduler is not None:
        raise ValueError(
            f"a learning-rate schedule ({client.scheduler!r}) needs an optimizer, and neither "
            'initialize(optimizer=...) nor the config\'s "optimizer" section gives one'
        )
    if optimizer is None:
        log.warning(
            'the config\'s "scheduler" section (%s) has no effect: no optimizer is given', plan.scheduler.type
        )
        return None
    if client.scheduler is not None:
        _warn_unused("scheduler", plan.scheduler.type)
        return client.scheduler(optimizer) if callable(client.scheduler) else client.scheduler
    return zoptim.make_schedule(plan.scheduler.type, optimizer, plan.scheduler.params)


def make_runner(plan: Plan, module: nn.Module, device: torch.device, checkpointing: Callable[[], Any]) -> Runner:
    """Return the runner of forward, after changing `module` as the plan asks."""
    runner: Runner = CastingRunner(plan.precision) if plan.cast_inputs else Sequential()
    if plan.numerics.autocast != torch.float32:
        runner = AutocastRunner(device.type, plan.numerics.autocast)
    held: list[Closable] = []
    with ExitStack() as done:  # undoes the changes if a later one fails
        if plan.precision.param in _NARROW:
            wide = zprecision.WideBuffers.install(module, keep=plan.precision.keep, param=plan.precision.param)
            runner = ExplainingRunner(runner, wide) if wide.names else runner
            casts = plan.cast_inputs or plan.numerics.autocast != torch.float32
            runner = runner if casts else InputDtypeRunner(runner, plan.precision.param)
            done.callback(wide.close)
        for change in _changes(plan, module, device, checkpointing):
            held.append(change)
            done.callback(change.close)
        done.pop_all()
    return RunnerWithCleanup(runner, tuple(held)) if held else runner


def _changes(
    plan: Plan, module: nn.Module, device: torch.device, checkpointing: Callable[[], Any]
) -> Iterator[Closable]:
    """Change the module as the plan asks; yield an object per change that can undo it."""
    float8, keep = plan.numerics.float8, plan.precision.keep
    if float8.modules:
        only, but = (
            zprecision.KeepInFp32(patterns=names, as_listed=False) for names in (float8.modules, float8.exclude)
        )
        yield zprecision.Float8.convert(module, device=device, only=only, but=but)
    if keep.patterns and plan.precision.param in _NARROW:
        for pattern in keep.unmatched(module):
            log.warning("data_types.keep_in_fp32_modules: %r matches no parameter or buffer of the model", pattern)
        yield zprecision.Fp32Modules.install(module, keep, plan.precision.param)
    if plan.activations.modules:
        from zengine.build.activation_checkpointing import checkpointed_blocks

        yield checkpointed_blocks(module, plan, checkpointing())


def make_inspect(partition: zpartition.Partition) -> Callable[..., zprecision.GradientStats]:
    """Return the inspection of the gradients of all ranks; it uses zoptim's kernels if available.

    With offload some gradients may be on the device and others on the host; each device is inspected separately, and
    the results are merged.
    """
    inspect_one = zprecision.inspect
    if not partition.has_all_shards:
        inspect_one = functools.partial(
            zprecision.inspect, all_reduce=functools.partial(partition.sum_over_shards, num_of_model=3)
        )

    def inspect(
        grads: Sequence[Tensor], *, extra: Tensor | Sequence[float], beside: Tensor
    ) -> zprecision.GradientStats:
        devices = list(dict.fromkeys([grad.device for grad in grads])) or [partition.device]
        if devices == [partition.device]:
            return inspect_one(grads, extra=extra, beside=beside, squares=_squares_on(devices[0]))
        found: list[zprecision.GradientStats] = []
        for device in devices:
            numbers = (None, None) if found else (extra, beside.to(device))
            here = [grad for grad in grads if grad.device == device]
            found.append(inspect_one(here, extra=numbers[0], beside=numbers[1], squares=_squares_on(device)))
        return zprecision.merge_stats(found, partition.device)

    return inspect


def _squares_on(device: torch.device) -> Callable[[Sequence[Tensor]], Tensor] | None:
    """Return zoptim's sum of squares; None if it has no kernels for `device`."""
    return zoptim.sum_of_squares if zoptim.has_kernels(device) else None


def make_divisor(
    plan: Plan, device: torch.device, *, dtype: torch.dtype = torch.float32
) -> Callable[[Numbers], Tensor | None]:
    """Return a function from the inspection to the gradients' divisor, () of `dtype`; None for a divisor of 1.

    A float64 divisor is rounded to 40 bits: ZeRO stages sum the norm in different orders, and agree only after that.
    """
    clip_norm, divides_always = plan.clip_norm, divides(plan)

    def divisor(numbers: Numbers) -> Tensor | None:
        if not divides_always and numbers.remainder == 1.0:
            return None
        value = zprecision.divisor_of(numbers.norm, numbers.scale * numbers.remainder, clip_norm)
        if dtype == torch.float64 and math.isfinite(value):
            fraction, exponent = math.frexp(value)
            value = math.ldexp(round(math.ldexp(fraction, 40)), exponent - 40)
        return torch.full((), value, dtype=dtype, device=device)

    return divisor


def _divisor_dtype(module: nn.Module) -> torch.dtype:
    """Return float32, which kernels read, or float64 for a module with float64 parameters."""
    return torch.float64 if any(param.dtype == torch.float64 for param in module.parameters()) else torch.float32


def divides(plan: Plan) -> bool:
    """Return True if gradients are clipped or carry a loss scale."""
    return plan.clip_norm != 0 or plan.scales_losses


def make_overflow_policy(plan: Plan, scaler: zprecision.Scaler, group: ProcessGroup | None) -> OverflowPolicy:
    """Return the policy for updates with non-finite gradients."""
    return SkipNonFinite(scaler, group) if plan.skip_nonfinite else apply_always


def make_saver(plan: Plan, partition: zpartition.Partition, group: ProcessGroup | None) -> Saver:
    """Return the writer of checkpoints; a collective if it works in the background."""
    if not plan.checkpoint.async_save:
        return BlockingSaver(lambda *args, **options: zckpt.save(*args, **options))  # late: imports on the first save
    own = zcomm.duplicate_host_group(group)

    def agree(mine: bool) -> bool:
        flag = torch.tensor([int(not mine)], dtype=torch.int32, device=partition.device)
        zcomm.all_reduce(flag, group, op="max", label="background save")
        return not int(flag)

    return BackgroundSaver(zckpt.AsyncSaver(zckpt.ALONE if own is None else zckpt.group_peers(own)), agree)


def make_training_loader(client: Client, plan: Plan, world: zcomm.World, groups: zcomm.Groups) -> Any:
    """Return a loader over the caller's dataset, equal on all ranks of one model replica; None without a dataset."""
    check_data(plan, client.training_data)
    if client.training_data is None:
        return None
    feed = make_feed(plan, rank=groups.get_data_parallel_rank(), device=world.device, collate_fn=client.collate_fn)
    return training_loader(client.training_data, plan.data, feed)


def _slot(optimizer: torch.optim.Optimizer) -> ShardOptimizer:
    return ShardOptimizer(optimizer, OwnStep(zoptim.accept_grad_scale(optimizer)))


def _call_maker(maker: Callable[[Any], torch.optim.Optimizer], parameters: list[Any]) -> torch.optim.Optimizer:
    made = maker(parameters)
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(f"optimizer= returned a {type(made).__name__}; it must return a torch.optim.Optimizer")
    return made


def _nothing_to_train_message(module: nn.Module, client: Client, plan: Plan) -> str:
    optimizer = f'the config\'s optimizer "{plan.optimizer.type}"' if client.optimizer is None else "optimizer="
    has_none = f"{type(module).__name__} has no floating-point parameters"
    is_empty = "model_parameters= is empty (model.parameters() is a generator: make it anew after reading it)"
    found = has_none if client.parameters is None else is_empty
    return (
        f"{optimizer} has nothing to train: {found}. Give the parameters to train (is all of "
        f"{type(module).__name__} frozen?), or leave the optimizer out to evaluate."
    )


def _check_narrow_states(optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Warn if a caller's optimizer keeps its states in the narrow dtype of the masters without being asked to.

    Raises:
        ValueError: the states would be float16, where second moments become 0 and weights NaN.
    """
    master = plan.precision.master
    if master is None:
        return  # `adapt_to_model` warns with the model's dtype
    is_requested = plan.numerics.narrow_states or any(group.get("state_dtype") for group in optimizer.param_groups)
    if master == torch.float16 and not is_requested and type(optimizer).__name__ != "SGD":
        raise ValueError(
            f"fp16.fp16_master_weights_and_grads: {type(optimizer).__name__} would keep its states in float16, where "
            'second moments become 0. Pass an optimizer of zoptim with state_dtype="fp32", let the config make it '
            '("optimizer": {"type": "AdamW"}), or leave the key out'
        )
    if master.itemsize < 4 and not is_requested:
        log.warning(
            "%s keeps its states in the dtype of the masters, %s, as torch's optimizers do: for float32 states "
            'beside narrow masters pass an optimizer of zoptim with state_dtype="fp32", or let the config make it',
            type(optimizer).__name__,
            str(master).removeprefix("torch."),
        )


def _warn_all_frozen(module: nn.Module) -> None:
    """Warn if no parameter requires a gradient: the module may be unfrozen later, or is evaluated."""
    count = sum(1 for _ in module.parameters())
    if count and not any(param.requires_grad for param in module.parameters()):
        log.warning(
            "nothing is trained: all %d parameters of %s are frozen (requires_grad=False), and an optimizer is "
            "given. Unfreeze the parameters to train, param.requires_grad_(True), before initialize() or later; to "
            "evaluate, leave the optimizer out",
            count,
            type(module).__name__,
        )


def _warn_unused(section: str, configured: str) -> None:
    if configured:
        log.warning('the config\'s "%s" section (%s) is not used: initialize() was given one', section, configured)
