"""`deepspeed.initialize`: zengine's, with DeepSpeed's arguments and with what was said about the model before.

Besides the names of arguments, three things come in here: modules that `set_z3_leaf_modules` was told of, an
`overflow` flag on the optimizer (Accelerate asks it whether a step was skipped), and DeepSpeed's mesh tuple.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from zengine.deepspeed.later import refusing
from zengine.deepspeed.utils import groups
from zengine.deepspeed.utils.leaves import leaf_names
from zengine.features import Feature
from zengine.initialize import Initialized
from zengine.initialize import initialize as make_engine
from zengine.sources import pick_config

if TYPE_CHECKING:
    from zengine.engine import Engine
    from zengine.report import StepReport

__all__ = ["initialize", "tp_model_init"]


@final
class OverflowFlag(Feature):
    """`optimizer.overflow`: whether the last boundary left the update out, which Accelerate calls skipped."""

    def attach(self, engine: Engine) -> None:
        optimizer: Any = engine.optimizer
        self._optimizer = optimizer
        if optimizer is not None:
            optimizer.overflow = False

    def step_end(self, report: StepReport) -> None:
        if self._optimizer is not None:
            self._optimizer.overflow = not report.applied


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

    mesh_param: a DeviceMesh, or DeepSpeed's (data parallel, sequence parallel) sizes, of which the second must be 1.

    Raises what `zengine.initialize` does, and NotAvailable for a sequence-parallel mesh.
    """
    given = pick_config(args, config, config_params)
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
        config=_with_leaves(given, leaf_names(model)),
        mesh=_mesh(mesh_param),
    )
    groups.mpu = mpu
    found[0].add_feature(OverflowFlag())
    return found


def tp_model_init(model: nn.Module, tp_size: int, dtype: torch.dtype, config: Any = None, **kwargs: Any) -> nn.Module:
    """The model in `dtype`, ready for `initialize`.  Raises NotAvailable for a tp_size of more than 1."""
    if tp_size > 1:
        refusing("tp_model_init(tp_size > 1)")
    return model.to(dtype)


def _mesh(mesh_param: Any) -> Any:
    if not isinstance(mesh_param, (tuple, list)):
        return mesh_param
    if any(size != 1 for size in mesh_param[1:]):
        refusing("utils.groups sequence group")
    return None  # all ranks are replicas: the default


def _with_leaves(given: Any, names: tuple[str, ...]) -> Any:
    """The config with the names of leaf modules added; as it is when there are none."""
    if not names:
        return given
    if isinstance(given, (str, os.PathLike)):
        text = os.fspath(given)
        if not text.lstrip().startswith("{"):
            with open(text, encoding="utf-8-sig") as file:
                text = file.read()
        given = json.loads(text)
    settings: dict[str, Any] = dict(given)
    zero = settings.get("zero_optimization")
    zero = dict(zero) if isinstance(zero, Mapping) else {}
    leaves = dict(zero.get("leaf_module") or {})
    leaves["names"] = list(dict.fromkeys((*leaves.get("names", ()), *names)))
    return {**settings, "zero_optimization": {**zero, "leaf_module": leaves}}
