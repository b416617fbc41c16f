"""Maximal-update parametrization: MuAdam, MuAdamW and MuSGD, whose learning rates are those of a small base model.

In muP (Yang and others 2022, "Tensor Programs V") the best learning rate of a narrow model is the best one of a wide
model, if each weight's rate is scaled by its widths over those of the base model.  The package `mup` gives each
parameter an `infshape` (`mup.set_base_shapes(model, base)`), and this module splits the parameter groups by it:

| optimizer | wide dimensions | lr | weight decay |
|---|---|---|---|
| MuAdam, MuAdamW | two | / width | * width |
| MuSGD | two | / (fan-in / fan-out) | * (fan-in / fan-out) |
| MuSGD | one | * width | / width |
| all | none (Adam: at most one) | as given | as given |

width: the parameter's `infshape.width_mult()`; the ratio: `infshape.fanin_fanout_mult_ratio()`.  The groups are those
of mup's functions of the same names, without empty ones, over zoptim's Adam, AdamW and SGD.  Each has its factor as
`mup_lr_factor`, by which zoptim's schedules multiply a rate that is given for all groups; DeepSpeed's warm-up sets
one rate everywhere, which undoes the parametrization.

Rejected: calling mup's functions.  They take no names of parameters, and keep the factors to themselves.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch

from zoptim.errors import BaseShapesMissingError
from zoptim.optimizers.base import Params

__all__ = ["LR_FACTOR", "MUP_NAMES", "mup_groups"]

LR_FACTOR = "mup_lr_factor"  # key of a parameter group

# Name in lower case -> the optimizer that it scales.
MUP_NAMES: Mapping[str, str] = {"muadam": "Adam", "muadamw": "AdamW", "musgd": "SGD"}


def mup_groups(name: str, params: Params, *, lr: float, weight_decay: float) -> list[dict[str, Any]]:
    """Return parameter groups with scaled rates, for the optimizer that `MUP_NAMES` has for `name`.

    params: parameters, named parameters or group dicts.  lr, weight_decay: of groups that have none.

    Raises:
        BaseShapesMissingError: a parameter has no base shape; says what to install or to call.
        ValueError: more than two dimensions of a parameter are wide.
    """
    factor_of = _sgd_factor if name.lower() == "musgd" else _adam_factor
    split: list[dict[str, Any]] = []
    for group in _as_groups(params):
        split += _split(name, group, factor_of, lr, weight_decay)
    return split


def _as_groups(params: Params) -> list[dict[str, Any]]:
    items: list[Any] = list(params)
    if items and isinstance(items[0], dict):
        return [{**item, "params": _listed(item["params"])} for item in items]
    return [{"params": items}]


def _listed(params: Any) -> list[Any]:
    return [params] if isinstance(params, torch.Tensor) else list(params)


def _split(
    name: str, group: dict[str, Any], factor_of: Callable[[Any], float], lr: float, weight_decay: float
) -> list[dict[str, Any]]:
    """Return one group for each factor, in the order in which parameters have them."""
    members: dict[float, list[Any]] = {}
    for item in group["params"]:
        label, param = item if isinstance(item, tuple) else ("", item)
        members.setdefault(factor_of(_shape_of(name, label, param)), []).append(item)
    rest = {"lr": lr, "weight_decay": weight_decay, **{key: value for key, value in group.items() if key != "params"}}
    return [
        {
            **rest,
            "params": params,
            "lr": rest["lr"] * factor,
            "weight_decay": rest["weight_decay"] / factor,
            LR_FACTOR: factor,
        }
        for factor, params in (members or {1.0: []}).items()
    ]


def _shape_of(name: str, label: str, param: torch.Tensor) -> Any:
    """Return mup's InfShape of a parameter, with at most two wide dimensions."""
    shape = getattr(param, "infshape", None)
    what = f"parameter {label!r} {tuple(param.shape)}" if label else f"a parameter of shape {tuple(param.shape)}"
    if shape is None:
        is_installed = importlib.util.find_spec("mup") is not None
        first = "" if is_installed else "Install the package mup (pip install mup), and call"
        raise BaseShapesMissingError(
            f"{name}: {what} has no base shape, by which its learning rate is scaled. {first or 'Call'} "
            "mup.set_base_shapes(model, base_model) before initialize()."
        )
    if shape.ninf() > 2:
        raise ValueError(
            f"{name}: {what} has {shape.ninf()} wide dimensions; muP scales at most two. Give a base model in which "
            "the others have the same size"
        )
    return shape


def _adam_factor(shape: Any) -> float:
    return 1.0 / float(shape.width_mult()) if shape.ninf() == 2 else 1.0


def _sgd_factor(shape: Any) -> float:
    if shape.ninf() == 2:
        return 1.0 / float(shape.fanin_fanout_mult_ratio())
    return float(shape.width_mult()) if shape.ninf() == 1 else 1.0
