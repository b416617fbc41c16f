"""`deepspeed.initialize`: zengine's, with DeepSpeed's arguments.

It adds the leaf modules of `set_z3_leaf_modules`, DeepSpeed's class of the optimizer (returned_optimizer.py), the
marks of parameters at stage 3 (marks.py), and DeepSpeed's mesh tuple.  A module can be passed again: its first engine
is closed then.
"""

from __future__ import annotations

import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn

import zoptim
import zpartition
from zengine.as_deepspeed import API_VERSION
from zengine.checkpoint.recovery_script import is_url, write_recovery_script
from zengine.config import load
from zengine.config.grammar.source import read
from zengine.config.plan.elastic import BATCH_KEYS
from zengine.deepspeed.comm import get_world_size, init_distributed, initialize_mesh_device, is_initialized
from zengine.deepspeed.comm.discovery import discover_ranks
from zengine.deepspeed.elasticity.config import elastic_errors
from zengine.deepspeed.marks import ZeroMarks
from zengine.deepspeed.returned_optimizer import ReturnedOptimizer
from zengine.deepspeed.runtime.activation_checkpointing import checkpointing
from zengine.deepspeed.runtime.pipe.topology import PipelineGrid
from zengine.deepspeed.runtime.torch_autocast import init_autocast_params
from zengine.deepspeed.throughput import Throughput
from zengine.deepspeed.utils import groups
from zengine.deepspeed.utils.leaves import leaf_names, mark_configured
from zengine.deepspeed.utils.logging import log_dist
from zengine.deepspeed.wall_clock import EngineObjects, WallClock
from zengine.engine.clock import Phase
from zengine.engine.parts import Run
from zengine.features import Feature
from zengine.imports import own_version
from zengine.initialize import Initialized, by_position, pick_config
from zengine.initialize import initialize as make_engine
from zengine.pipeline_engine import PipelineEngine
from zpartition import tensor

if TYPE_CHECKING:
    from zengine.deepspeed_engine import DeepSpeedEngine
    from zengine.engine.runners import Runner

__all__ = ["initialize", "tp_model_init"]

log = logging.getLogger("zengine")
_TESTED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, zoptim.FlatOptimizer)

_engines: weakref.WeakValueDictionary[int, DeepSpeedEngine] = weakref.WeakValueDictionary()  # in order, on all ranks
_numbers = itertools.count()


@elastic_errors()
@zpartition.suspend_init()
def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> Initialized:
    """`zengine.initialize` with DeepSpeed's arguments; returns (engine, optimizer, dataloader, lr_scheduler).

    mesh_param: a DeviceMesh, or DeepSpeed's (data parallel, sequence parallel) sizes.

    Raises what `zengine.initialize` does (for the section `elasticity` alone also an ElasticityError), and
        ValueError: sizes do not match the world size.
        AssertionError (DeepSpeed's): there is no model, or the config says that the optimizer is none that may be
            sharded.
    """
    log_dist(f"DeepSpeed info: version={API_VERSION} (zengine {own_version()})", ranks=[0])
    args, model, config = by_position(args, model, config)
    assert model is not None, "deepspeed.initialize requires a model: pass model=, a torch.nn.Module"
    mpu, mesh = _resolve_mesh(mpu, mesh_param)
    given = pick_config(args, config, config_params)
    _check_tested(optimizer, read(given).data)
    given = _without_unused_packing(
        _add_leaf_names(_count_replicas(given, model), leaf_names(model)), has_data=training_data is not None
    )
    _check_config(given)  # a wrong config closes no other engine
    _hand_over(model)
    if not is_initialized():
        discover_ranks(distributed_port)
    found = make_engine(
        model=model,
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        distributed_port=distributed_port,
        mpu=mpu,
        dist_init_required=dist_init_required,
        collate_fn=collate_fn,
        config=given,
        mesh=mesh,
    )
    groups.mpu, groups.mesh_device = mpu, mesh
    groups.use(found[0])
    _attach(found[0], ReturnedOptimizer(is_clients=optimizer is not None, mpu=mpu))
    return found


def _check_config(given: Any) -> None:
    """Raise ConfigError if the config is wrong, ElasticityConfigError if elasticity is not what was scheduled."""
    load(given)
    data = read(given).data
    section = _section(data if isinstance(data, Mapping) else {}, "elasticity")
    if section.get("enabled") is True:
        from zengine.deepspeed.elasticity import ensure_immutable_elastic_config

        ensure_immutable_elastic_config(section)


class RecoveryScript(Feature):
    """Writes `zero_to_fp32.py` beside checkpoints of ZeRO 1 to 3."""

    def attach(self, run: Run) -> None:
        self._writes = run.parts.world.rank == 0 and run.plan.zero.stage > 0

    def checkpoint_saved(self, save_dir: str) -> None:
        if not self._writes or is_url(save_dir):
            return
        try:
            write_recovery_script(save_dir)
        except OSError as error:  # the checkpoint itself is saved
            log.warning("zero_to_fp32.py could not be written beside the checkpoints: %s", error)


def _attach(engine: DeepSpeedEngine, returned: ReturnedOptimizer) -> None:
    """Give the engine, its module, parameters and optimizer what only DeepSpeed's interface has."""
    try:
        _add_names(engine, returned)
    except BaseException:  # nobody has the engine: the module is free again
        engine.close()
        raise


def _add_names(engine: DeepSpeedEngine, returned: ReturnedOptimizer) -> None:
    mark_configured(engine.module, engine.plan.leaf_modules)
    engine.add_feature(returned)
    engine.add_feature(ZeroMarks())
    engine.add_feature(Throughput(engine.train_batch_size()))
    engine.add_feature(RecoveryScript())
    engine._deepspeed = EngineObjects(engine.plan)
    if engine._deepspeed.engine_timers.active_timers():
        engine.add_feature(WallClock(engine._deepspeed))
    if engine.plan.zero.narrow_dtype is not None:
        init_autocast_params(engine, engine.plan.zero.narrow_dtype, engine.plan.zero.narrow_classes)
    _engines[next(_numbers)] = engine
    if isinstance(engine, PipelineEngine):
        made = PipelineGrid(engine.module, engine.num_stages, engine.plan.parallel.degrees.tensor)
        engine.grid = made.grid
        engine.add_feature(made)
    checkpointing.adopt_settings(engine.plan.activations, engine.parts.partition.mp_group)


def _hand_over(model: Any) -> None:
    """Close the engines whose module is `model`, and those without an optimizer that have parameters of it.

    One without an optimizer calls the module's forward from now on: TRL computes reference log-probabilities with
    such an engine, keeps it, and then trains the module.  At stage 3 a collective, if there is one.
    """
    wanted = {id(param) for param in model.parameters()} if _engines and isinstance(model, nn.Module) else set()
    for _, engine in sorted(_engines.items()):
        is_shared = engine.optimizer is None and bool(wanted & {id(param) for param in engine.module.parameters()})
        if engine.clock.phase is Phase.CLOSED or not (engine.module is model or is_shared):
            continue
        if engine.optimizer is not None:
            log.warning(
                "initialize() got the module of an open engine (%d steps): that engine is closed, and the new one "
                "continues with its weights",
                engine.global_steps,
            )
        is_evaluating = engine.optimizer is None
        engine.close()
        if is_evaluating:
            vars(engine)["forward"] = functools.partial(_forward, engine.parts.runner, engine.module)


def _forward(runner: Runner, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return runner.forward(module, args, kwargs)


def tp_model_init(
    model: nn.Module, tp_size: int, dtype: torch.dtype | None = None, config: Any = None, **kwargs: Any
) -> nn.Module:
    """Split `model` in place over `tp_size` consecutive ranks, in `dtype`; return it, ready for `initialize`.

    config: a `zpartition.tensor.TensorPlan`, DeepSpeed's config or its "partition_config".  Without it the plan is
        the model's `tp_plan`, or is inferred from a small input: `dummy_inputs`, or inputs=.

    Raises ValueError as `zpartition.tensor.tp_model_init` does.
    """
    if tp_size == 1:
        return model if dtype is None else model.to(dtype)
    init_distributed()
    if isinstance(config, Mapping):
        section = config.get("tensor_parallel", config)
        config = section.get("partition_config", section)
    inputs = kwargs.pop("inputs", ())
    if kwargs:
        raise TypeError(f"tp_model_init() got {', '.join(kwargs)}; allowed are model, tp_size, dtype, config, inputs")
    return tensor.tp_model_init(model, tp_size, dtype, config, inputs=inputs)


def _check_tested(optimizer: object, data: object) -> None:
    """Require an optimizer that DeepSpeed has tested with ZeRO, if "zero_allow_untested_optimizer" is false."""
    if not isinstance(data, Mapping) or data.get("zero_allow_untested_optimizer", True) is not False:
        return
    is_tested = not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, _TESTED)
    assert is_tested or not _section(data, "zero_optimization").get("stage", 0), (
        f"{type(optimizer).__name__} is an untested ZeRO optimizer, and the config has "
        '"zero_allow_untested_optimizer": false. Here every elementwise torch optimizer can be sharded: leave it out.'
    )


def _resolve_mesh(mpu: Any, mesh_param: Any) -> tuple[Any, Any]:
    """Return (mpu, mesh); a tuple of sizes becomes a mesh."""
    if not isinstance(mesh_param, (tuple, list)):
        return mpu, mesh_param
    data, sequence = (*mesh_param, 1)[:2]
    if sequence == 1:  # replicas follow from the other parallelism
        if data < 1 or get_world_size() % data:
            raise ValueError(
                f"mesh_param={tuple(mesh_param)}: {data} replicas do not divide {get_world_size()} ranks"
            )
        return mpu, None
    if mpu is not None:
        raise ValueError("initialize() got both mpu= and mesh_param=; pass one of them")
    return None, initialize_mesh_device((data, sequence), ("data_parallel", "sequence_parallel"))


def _section(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of the config; empty if it is missing, or malformed (`load` raises then)."""
    found = data.get(name)
    return found if isinstance(found, Mapping) else {}


def _count_replicas(given: Any, model: nn.Module | None) -> Any:
    """Return the config with a train_batch_size that counts replicas, if it counted every rank.

    DeepSpeed, Accelerate and Trainer multiply by all ranks, including tensor-parallel ranks, which see the same
    samples.
    """
    document = read(given)
    data = document.data if isinstance(document.data, Mapping) else {}
    section = _section(data, "tensor_parallel")
    sizes_given = (
        section.get("autotp_size"),
        _section(section, "tp").get("tp_size"),
        zpartition.model_parallel_group_of(model or nn.Module()).size,
    )
    shared = max(each for each in sizes_given if isinstance(each, int))
    sizes = [data.get(key) for key in BATCH_KEYS]
    train, micro, steps = (size if type(size) is int else 0 for size in sizes)
    if shared == 1 or not train or train != micro * steps * get_world_size() or train % shared:
        return given
    log.warning(
        "train_batch_size %d counts each of the %d ranks that share a replica; using %d",
        train,
        shared,
        train // shared,
    )
    return attrs.evolve(document, data={**data, "train_batch_size": train // shared})


def _add_leaf_names(given: Any, names: tuple[str, ...]) -> Any:
    """Return the config with the names of leaf modules added and the origin of every key kept."""
    document = read(given) if names else None
    if document is None or not isinstance(document.data, Mapping):
        return given
    zero = _section(document.data, "zero_optimization")
    leaves = _section(zero, "leaf_module")
    written = leaves.get("names", [])
    is_valid = {type(document.data.get("zero_optimization")), type(zero.get("leaf_module"))} <= {dict, type(None)}
    if not (is_valid and isinstance(written, list)):
        return given  # `load` raises for it
    leaf_module = {**leaves, "names": list(dict.fromkeys((*written, *names)))}
    zero_optimization = {**zero, "leaf_module": leaf_module}
    return attrs.evolve(document, data={**document.data, "zero_optimization": zero_optimization})


def _without_unused_packing(given: Any, *, has_data: bool) -> Any:
    """Return the config without data sampling, if the caller packs batches.

    That is with dynamic batching but no training data: `variable_batch_size_and_lr` reads the section then.
    """
    document = None if has_data else read(given)
    if document is None or not isinstance(document.data, Mapping):
        return given
    efficiency = _section(document.data, "data_efficiency")
    sampling = _section(efficiency, "data_sampling")
    is_packed = _section(sampling, "dynamic_batching").get("enabled") is True and sampling.get("enabled") is True
    if not is_packed or _section(sampling, "curriculum_learning").get("enabled"):
        return given
    changed = {**efficiency, "data_sampling": {**sampling, "enabled": False}}
    return attrs.evolve(document, data={**document.data, "data_efficiency": changed})
