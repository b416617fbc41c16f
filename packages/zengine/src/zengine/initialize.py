"""`initialize`: from a module and a config to engine, optimizer, loader and schedule.

1. Read one config strictly; errors name key, line and remedy, the same on every rank.
2. Resolve it for the world size of the environment, before a process group exists.
3. Join the world: torchrun, SLURM, MPI, or this process alone.
4. Compare what the ranks were given, before anything relies on their agreement.
5. Make the parts, and an engine around them.

A rank that fails alone in any of these tells the others (build/failures.py).

`import zengine` imports neither torch nor the parts; `initialize` does.  So `zengine --help` is fast.
"""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar

from zengine.imports import gc_paused, is_pipeline

if TYPE_CHECKING:
    import argparse

    import torch
    from torch import nn
    from torch.distributed import ProcessGroup

    import zcomm
    from zengine.build.assemble import Client
    from zengine.build.groups import ProcessLayout
    from zengine.config import Config, ConfigError, Facts, Plan
    from zengine.deepspeed_engine import DeepSpeedEngine

__all__ = [
    "FASTER_BY",
    "add_config_arguments",
    "bf16_is_faster",
    "by_position",
    "initialize",
    "make_engine",
    "pick_config",
]

log = logging.getLogger("zengine")

P = ParamSpec("P")
T = TypeVar("T")

Initialized: TypeAlias = "tuple[DeepSpeedEngine, torch.optim.Optimizer | None, Any, Any]"

FASTER_BY = 1.1  # speed-up below which bf16 is not worth the loss of precision


def _suspending_init(function: Callable[P, T]) -> Callable[P, T]:
    """Suspend `zpartition.Init` blocks that are open while `function` runs; they continue afterwards."""

    @functools.wraps(function)
    def suspended(*args: P.args, **kwargs: P.kwargs) -> T:
        with gc_paused():
            import zpartition
        with zpartition.suspend_init():
            return function(*args, **kwargs)

    return suspended


@_suspending_init
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
    """Prepare `model` for training by `config`; return (engine, optimizer, dataloader, lr_scheduler).

    `initialize(model, config)` works, too, although DeepSpeed's first argument is `args`.

    Args:
        args: may carry the config's path as `args.deepspeed_config`.
        model: any module; it is moved to the device, cast and partitioned in place.
        optimizer: an instance over the model's parameters, or a callable (parameters -> optimizer); overrides the
            config's section, with a warning.
        model_parameters: parameters or groups of the optimizer; default: every parameter that requires a gradient.
        training_data: a dataset; the returned dataloader shards and shuffles it, and its position is saved.
        lr_scheduler: a schedule, or a callable (optimizer -> schedule); advanced once per applied update.  A name
            belongs into the config's section "scheduler".
        distributed_port: port of the rendezvous if the environment sets none.
        mpu: an object with `get_data_parallel_group()`, and `get_model_parallel_group()` (or a newer name of
            Megatron's) if layers are split: by the config, or by the model's code, which marks its parameters.
        dist_init_required: False: a process group must exist. None or True: one is made if there is none.
        collate_fn: joins samples to a batch.
        config: path, dict or JSON text in DeepSpeed's format; `config_params` is an old name of it.
        mesh: a DeviceMesh with axes of `zcomm.Groups.from_mesh`; without one the config's degrees place all ranks.

    Open `zpartition.Init` and `zero.Init` blocks are suspended meanwhile: models that were built inside them so far
    can be passed, and those built afterwards are deferred again.

    The optimizer, dataloader and lr_scheduler are None if neither the caller nor the config gives one.

    Raises:
        ConfigError: the config is invalid, or does not fit the world; before any process group exists.
        TypeError, ValueError: an argument is invalid; the message names it.

    >>> import torch, zengine
    >>> config = {"train_batch_size": 2, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW"}}
    >>> model, data = torch.nn.Linear(4, 1), list(torch.ones(4, 4))
    >>> engine, optimizer, loader, _ = zengine.initialize(model=model, config=config, training_data=data)
    >>> for batch in loader:
    ...     _ = engine.backward(engine(batch).square().mean())
    ...     report = engine.step()
    >>> report.step, report.samples
    (2, 4)
    >>> engine.close()
    """
    with gc_paused():
        from zengine.build.assemble import Client
        from zengine.build.failures import telling_peers
        from zengine.config import load
    client = Client(
        optimizer=optimizer,
        parameters=model_parameters,
        scheduler=lr_scheduler,
        training_data=training_data,
        collate_fn=collate_fn,
        mpu=mpu,
    )
    with telling_peers("initialize()", model):
        args, model, config = by_position(args, model, config)
        source = pick_config(args, config, config_params)
        model = _check_objects(model, optimizer, lr_scheduler)
        engine = _initialize(load(source), model, client, mesh, dist_init_required, distributed_port)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _initialize(
    settings: Config, model: nn.Module, client: Client, mesh: Any, dist_init_required: bool | None, port: int | None
) -> DeepSpeedEngine:
    """Check the config, join the world, and make the engine there."""
    with gc_paused():
        import torch

        from zengine.build.groups import process_layout
        from zengine.build.mpu import groups_for_model
        from zengine.config import resolve
        from zengine.engine.module_attributes import warning_of_collisions
    with ExitStack() as stack:
        if settings.settings.signals.actions:
            from zengine.features.signals import catching

            stack.enter_context(catching(settings.settings.signals))
        if not torch.distributed.is_initialized():  # check every rule before ranks depend on each other
            _check_plan(settings, model, client.training_data)
        world = _make_world(dist_init_required, port)
        layout = process_layout(client.mpu, mesh, model)
        plan = resolve(settings, facts_of_world(settings, world, layout))
        groups = groups_for_model(model, plan, layout)
        _log_notices(plan, world)
        engine = make_engine(model, client, plan, world, groups)
    _warn(world, warning_of_collisions(engine))
    return engine


@_suspending_init
def make_engine(
    model: nn.Module, client: Client, plan: Plan, world: zcomm.World, groups: zcomm.Groups
) -> DeepSpeedEngine:
    """Return an engine from a resolved plan, for callers without a JSON config."""
    with gc_paused():
        from zengine.build.assemble import assemble, make_features
        from zengine.build.pipeline import fit_plan
        from zengine.build.trainable import dtypes_of
        from zengine.config.plan.fit_model import adapt_to_model
        from zengine.deepspeed_engine import ClientObjects, DeepSpeedEngine
        from zengine.engine.optimizer_calls import OptimizerCalls
        from zengine.features.builtin import LoaderMarks
    plan, notice = adapt_to_model(fit_plan(model, plan), dtypes_of(model))
    _warn(world, notice)
    parts = assemble(model, client, plan, world, groups)
    if is_pipeline(model):
        from zengine.pipeline_engine import PipelineEngine, make_pipeline  # imports all that pipelines need

        pipeline = make_pipeline(model, parts, plan)
        engine: DeepSpeedEngine = PipelineEngine(model, parts, plan, pipeline)
    elif plan.hybrid_engine.enabled:
        from zengine.hybrid_engine import DeepSpeedHybridEngine  # imports all that generation needs

        pipeline, engine = None, DeepSpeedHybridEngine(model, parts, plan)
    else:
        pipeline, engine = None, DeepSpeedEngine(model, parts, plan)
    engine._client = ClientObjects(optimizer=client.optimizer, scheduler=client.scheduler, mpu=client.mpu)
    try:
        if parts.optimizer.scaled is not None:
            engine.add_feature(
                OptimizerCalls(parts.optimizer.scaled, engine._optimizer_step, engine._optimizer_zero_grad)
            )
        if parts.loader is not None:
            engine.add_feature(LoaderMarks())
        for feature in make_features(plan, parts.partition, pipeline):
            engine.add_feature(feature)
        if plan.signals.actions:  # the last one: the others have ended the step when it saves
            from zengine.features.signals import Signals

            engine.add_feature(Signals(plan.signals, engine.save_checkpoint))
    except BaseException:
        parts.partition.close(keep_weights=False)  # as in `assemble`: other ranks may not get here
        engine.close()
        raise
    return engine


def _warn(world: zcomm.World, notice: str) -> None:
    """Log a warning on rank 0; nothing if `notice` is empty."""
    if notice and world.rank == 0:
        log.warning("%s", notice)


def _log_notices(plan: Plan, world: zcomm.World) -> None:
    if plan.log_level:
        log.setLevel(plan.log_level.upper())
    for notice in plan.notices:
        _warn(world, notice)


# -- the arguments -------------------------------------------------------------------------------


def by_position(args: Any, model: Any, config: Any) -> tuple[Any, Any, Any]:
    """Return (args, model, config) of a call that may be `initialize(model, config)`.

    Raises:
        TypeError: the second argument is neither a config nor left out.
        ConfigError: the config is given twice.
    """
    from torch import nn

    if not isinstance(args, nn.Module):
        return args, model, config
    if model is not None and not isinstance(model, (str, os.PathLike, Mapping)):
        raise TypeError(
            f"initialize({type(args).__name__}, {type(model).__name__}): the first two arguments are args and model, "
            "as in DeepSpeed; initialize(model, config) works, too, with a path, a dict or JSON text. Name the "
            "others: initialize(model=model, optimizer=optimizer, config=config)."
        )
    if model is not None and config is not None:
        raise _config_error(
            f"the config was given 2 times (the second argument is {_short(model)}, config= is {_short(config)})",
            "Keep one of them.",
        )
    return None, args, model if config is None else config


def _check_objects(model: object, optimizer: object, lr_scheduler: object) -> nn.Module:
    """Return the model.

    Raises:
        TypeError: it is no module; or the optimizer or the schedule is neither an object nor a function, but a name.
    """
    from torch import nn

    if not isinstance(model, nn.Module):
        raise TypeError(f"initialize() needs model=, a torch.nn.Module; got {_what_is(model)}")
    accepted = {
        "optimizer": "a torch.optim.Optimizer, or a function parameters -> optimizer; or leave it out and describe "
        'it in the config, as "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}',
        "lr_scheduler": "a schedule such as torch's, or a function optimizer -> schedule; or leave it out and "
        'describe it in the config, as "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 10000}}',
    }
    for name, given in (("optimizer", optimizer), ("lr_scheduler", lr_scheduler)):
        if given is not None and not callable(given) and not hasattr(given, "step"):
            raise TypeError(f"initialize({name}={_short(given)}): pass {accepted[name]}.")
    return model


def _what_is(model: object) -> str:
    """Return what was passed for the model, and what to pass."""
    if isinstance(model, type):
        return f"the class {model.__name__}: pass an instance, model={model.__name__}(...)"
    name = type(model).__name__
    if isinstance(model, str):
        return f"{name} ({_short(model)}): load the model first, and pass the module"
    return f"{name}: pass the module itself, model=net"


# -- the config ----------------------------------------------------------------------------------


def pick_config(args: Any, config: Any, config_params: Any) -> Any:
    """Return the one config that was given.

    Sources with the same content are one: DeepSpeed's own launchers give the path and the dict.

    Raises:
        ConfigError: none was given, or several that differ.
    """
    named = {
        "config=": config,
        "config_params=": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
        "args.deepscale_config": getattr(args, "deepscale_config", None),  # its first name
    }
    given = {name: value for name, value in named.items() if value is not None}
    if len(given) > 1 and not _are_equal(list(given.values())):
        values = ", ".join(f"{name} is {_short(value)}" for name, value in given.items())
        raise _config_error(f"the config was given {len(given)} times ({values})", "Keep one of them.")
    if not given:
        raise _config_error(
            "no config was given",
            "Pass config= (a path, a dict or JSON text), or args= with --deepspeed_config FILE "
            "(zengine.add_config_arguments adds it to a parser).",
        )
    return next(iter(given.values()))


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config FILE`; pass the parsed result to `initialize(args=...)`.

    `--deepspeed` only lets old command lines parse; the script decides if it uses the engine.
    """
    group = parser.add_argument_group("zengine", "training engine")
    group.add_argument("--deepspeed", action="store_true", help="accepted for old command lines; no effect")
    group.add_argument("--deepspeed_config", default=None, metavar="FILE", help="JSON config of the engine")
    return parser


def _are_equal(sources: list[Any]) -> bool:
    """Return True if all sources have the same content; False if one cannot be read."""
    from zengine.config import ConfigError
    from zengine.config.grammar.source import read

    try:
        documents = [read(source) for source in sources]
    except (ConfigError, TypeError):
        return all(source is sources[0] for source in sources)
    return all(document.data == documents[0].data for document in documents)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _config_error(reason: str, suggestion: str) -> ConfigError:
    from zengine.config import ConfigError, Problem

    return ConfigError("initialize()", [Problem(reason=reason, suggestion=suggestion)])


# -- facts and the world -------------------------------------------------------------------------


def _check_plan(settings: Config, model: nn.Module, training_data: Any) -> None:
    """Resolve the config for the world that the environment describes, and check it against model and data."""
    import zcomm
    from zengine.build.loaders import check_data
    from zengine.build.pipeline import check_pipeline, pipeline_axes
    from zengine.config import Facts, resolve

    num_ranks, axes = zcomm.detect().world_size, pipeline_axes(model)
    facts = Facts(
        world_size=num_ranks,
        replicas=num_ranks // math.prod(axes.values()),
        device_type=_device_type(),
        axes=axes,
        axes_source="the model",
    )
    plan = resolve(settings, facts)
    check_pipeline(model, plan)
    check_data(plan, training_data)


def facts_of_world(settings: Config, world: zcomm.World, layout: ProcessLayout) -> Facts:
    from zengine.config import Facts

    return Facts(
        world_size=world.world_size,
        replicas=layout.replicas,
        device_type=world.device.type,
        ranks_per_host=world.launch.local_world_size,
        bf16_is_faster=bf16_is_faster(settings, world.device, layout.world()),
        axes=layout.axes,
        axes_source=layout.source,
    )


def bf16_is_faster(config: Config, device: torch.device, group: ProcessGroup | None) -> bool:
    """Return True if bf16 matrix products are faster than fp32 ones on `device`, for `bf16.enabled: "auto"`.

    Rank 0 measures, and all ranks get its result: a collective.  False without a measurement if no key is "auto".
    """
    import zcomm
    import zprecision

    if config.settings.bf16.enabled != "auto":
        return False
    measured = zcomm.group_rank(group) == 0 and zprecision.measure_bf16_speedup(device) >= FASTER_BY
    return bool(zcomm.all_gather_object(measured, group)[0])


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
