"""`initialize`: from a plain module and a config to the four things that a training loop needs.

1. one config source, read strictly;     (errors here name key, line and cure, on every rank alike)
2. resolved against the world's size, before any process group exists;
3. the world: torchrun, SLURM, MPI, or this process alone;
4. agreement: ranks compare what they were given, before anything is exchanged that assumes they agree;
5. parts, and an engine around them.

torch and the parts are imported when an engine is made, and not by `import zengine`: a program that only shows its
help does not pay for them.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

from zengine.imports import uncollected

if TYPE_CHECKING:
    import torch
    from torch import nn

    import zcomm
    from zengine.build.assemble import Client
    from zengine.build.groups import LaidOut
    from zengine.config import Config, Facts, Plan
    from zengine.deepspeed_engine import DeepSpeedEngine
    from zengine.engine.parts import Parts
    from zpartition.pipeline import PipelineRunner

log = logging.getLogger("zengine")

Initialized: TypeAlias = "tuple[DeepSpeedEngine, torch.optim.Optimizer | None, Any, Any]"


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh: Any = None,
    config_params: Any = None,
) -> Initialized:
    """Make `model` train as `config` says; returns (engine, optimizer, dataloader, lr_scheduler).

    Args:
        args: may carry the config's path as `args.deepspeed_config`.
        model: any module; it is moved to the device, cast and partitioned in place.
        optimizer: an instance over the model's parameters, or a callable (parameters -> optimizer); wins over the
            config's section, with a warning.
        model_parameters: what the optimizer is made over; default: every parameter that requires a gradient.
        training_data: a dataset; the returned dataloader shards, shuffles and remembers its position.
        lr_scheduler: a schedule, or a callable (optimizer -> schedule); advanced once per applied update.
        distributed_port: port of the rendezvous, where the environment names none.
        mpu: an object with `get_data_parallel_group()`, and `get_model_parallel_group()` where layers are split.
        dist_init_required: False: a process group must exist already. None or True: made when there is none.
        collate_fn: joins samples to a batch.
        config: path, dict or JSON text in DeepSpeed's format; `config_params` is an old name of it.
        mesh: a DeviceMesh with axes of `zcomm.Groups.from_mesh`; without one the config's degrees lay out all ranks.

    The optimizer, dataloader and lr_scheduler are None where neither the caller nor the config gives one.

    Raises:
        ConfigError: the config, or its combination with the world; before any process group exists.
        TypeError, ValueError: an argument; names it.
    """
    with uncollected():
        import torch
        from torch import nn

        from zengine.build.assemble import Client
        from zengine.build.config_source import pick_config
        from zengine.build.groups import laid_out, refuse_split_elsewhere
        from zengine.config import load, resolve
        from zengine.engine.module_attributes import warning_of_collisions
    source = pick_config(args, config, config_params)
    if not isinstance(model, nn.Module):
        raise TypeError(f"initialize() needs model=, a torch.nn.Module; got {type(model).__name__}")
    settings = load(source)
    if not torch.distributed.is_initialized():  # every rule is checked before ranks depend on each other
        _rehearse(settings, model, training_data)
    world = _make_world(dist_init_required, distributed_port)
    ranks = laid_out(mpu, mesh, model)
    plan = resolve(settings, _facts(settings, world, ranks))
    refuse_split_elsewhere(model, plan, ranks)
    _announce(plan, world)
    client = Client(
        optimizer=optimizer,
        parameters=model_parameters,
        scheduler=lr_scheduler,
        training_data=training_data,
        collate_fn=collate_fn,
    )
    engine = make_engine(model, client, plan, world, ranks.make(plan.parallel.degrees))
    _warn(world, warning_of_collisions(engine))
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _warn(world: zcomm.World, notice: str) -> None:
    """Log a warning on rank 0; nothing if `notice` is empty."""
    if notice and world.rank == 0:
        log.warning("%s", notice)


def _rehearse(settings: Config, model: nn.Module, training_data: Any) -> None:
    """Resolve against the world that the environment describes."""
    import zcomm
    from zengine.build.loaders import require_data
    from zengine.build.pipeline import check_pipeline
    from zengine.config import Facts, resolve
    from zengine.engine.stages import stage_axes

    num_ranks, axes = zcomm.detect().world_size, stage_axes(model)
    facts = Facts(
        world_size=num_ranks,
        replicas=num_ranks // math.prod(axes.values()),
        device_type=_device_type(),
        axes=axes,
        axes_source="the model",
    )
    plan = resolve(settings, facts)
    check_pipeline(model, plan)
    require_data(plan, training_data)


def make_engine(
    model: nn.Module, client: Client, plan: Plan, world: zcomm.World, groups: zcomm.Groups
) -> DeepSpeedEngine:
    """An engine from a resolved plan, for callers that have no JSON."""
    with uncollected():
        from zengine.build.assemble import assemble, make_features, make_pipeline
        from zengine.build.pipeline import fitted
        from zengine.build.trainable import dtypes_of
        from zengine.config.plan.fit_model import adapt_to_model
        from zengine.deepspeed_engine import DeepSpeedEngine
        from zengine.engine.optimizer_calls import OptimizerCalls
        from zengine.engine.stages import is_staged
    plan, notice = adapt_to_model(fitted(model, plan), dtypes_of(model))
    if notice and world.rank == 0:
        log.warning("%s", notice)
    parts = assemble(model, client, plan, world, groups)
    pipeline = make_pipeline(model, parts, plan) if is_staged(model) else None
    engine = DeepSpeedEngine(model, parts, plan) if pipeline is None else _staged(model, parts, plan, pipeline)
    try:
        if parts.optimizer.scaled is not None:
            engine.add_feature(
                OptimizerCalls(parts.optimizer.scaled, engine._optimizer_step, engine._optimizer_zero_grad)
            )
        for feature in make_features(plan, parts.partition, pipeline):
            engine.add_feature(feature)
    except BaseException:
        parts.partition.close(keep_weights=False)  # as in `assemble`: other ranks may not come along
        engine.close()
        raise
    return engine


def _staged(model: Any, parts: Parts, plan: Plan, pipeline: PipelineRunner) -> DeepSpeedEngine:
    from zengine.pipeline_engine import PipelineEngine  # imported only here, with all that pipelines need

    return PipelineEngine(model, parts, plan, pipeline)


def _facts(settings: Config, world: zcomm.World, ranks: LaidOut) -> Facts:
    from zengine.build.measure import bf16_is_faster
    from zengine.config import Facts

    return Facts(
        world_size=world.world_size,
        replicas=ranks.replicas,
        device_type=world.device.type,
        ranks_per_host=world.launch.local_world_size,
        bf16_is_faster=bf16_is_faster(settings, world.device, ranks.world()),
        axes=ranks.axes,
        axes_source=ranks.by,
    )


def _make_world(dist_init_required: bool | None, port: int | None) -> zcomm.World:
    import torch

    import zcomm

    if dist_init_required is False and not torch.distributed.is_initialized():
        raise ValueError(
            "dist_init_required=False, but torch.distributed has no default process group: call "
            "init_process_group() (or zcomm.init()) first, or leave dist_init_required out"
        )
    if port is not None:
        os.environ.setdefault("MASTER_PORT", str(port))
    return zcomm.init()


def _device_type() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _announce(plan: Plan, world: zcomm.World) -> None:
    if plan.log_level:
        log.setLevel(plan.log_level.upper())
    if world.rank == 0:
        for notice in plan.notices:
            log.warning("%s", notice)
