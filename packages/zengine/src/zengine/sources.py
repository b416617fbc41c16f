"""Where `initialize` finds its config and its group, when there are several ways to give them."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

import zpartition
from zengine.config import ConfigError, Problem


def pick_config(args: Any, config: Any, config_params: Any) -> Any:
    """The one config that was given.

    Raises:
        ConfigError: none was given, or more than one.
    """
    named = {
        "config=": config,
        "config_params=": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
    }
    given = {name: value for name, value in named.items() if value is not None}
    if len(given) > 1:
        values = ", ".join(f"{name} is {_short(value)}" for name, value in given.items())
        raise _refusal(f"the config was given {len(given)} times ({values})", "Keep one of them.")
    if not given:
        raise _refusal(
            "no config was given",
            "Pass config= (a path, a dict or JSON text), or args= with --deepspeed_config FILE "
            "(zengine.add_config_arguments adds it to a parser).",
        )
    return next(iter(given.values()))


def data_parallel_group(mpu: Any, mesh: DeviceMesh | None, model: nn.Module) -> ProcessGroup | None:
    """The group whose ranks are replicas; None for all ranks.  A split model tells it, unless somebody else does.

    Raises:
        ValueError: both were given, or they ask for model parallelism.
    """
    if mpu is not None and mesh is not None:
        raise ValueError("initialize() got both mpu= and mesh=: they may disagree about the ranks, keep one")
    if mesh is not None:
        return _group_of_mesh(mesh)
    if mpu is None:
        return zpartition.replicas_of(model)
    for name in (
        "get_model_parallel_world_size",
        "get_tensor_model_parallel_world_size",
        "get_pipeline_model_parallel_world_size",
    ):
        size = getattr(mpu, name, lambda: 1)()
        if size != 1:
            raise ValueError(f"mpu.{name}() is {size}: splitting the model itself is not available yet; it must be 1")
    group: ProcessGroup = mpu.get_data_parallel_group()
    return group


def _group_of_mesh(mesh: DeviceMesh) -> ProcessGroup:
    if mesh.ndim != 1:
        raise ValueError(
            f"mesh has the axes {mesh.mesh_dim_names} of sizes {tuple(mesh.shape)}; one axis of replicas is "
            "supported so far: pass the sub-mesh of that axis, mesh[name]"
        )
    return mesh.get_group()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _refusal(reason: str, suggestion: str) -> ConfigError:
    return ConfigError("initialize()", [Problem(reason=reason, suggestion=suggestion)])
