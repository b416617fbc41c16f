"""Facts of a module for the assembly: parameters to train, their dtypes and names, and names of its classes."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

import zcomm
from zpartition import pipeline_stages_of

__all__ = [
    "check_are_parameters",
    "check_class_names",
    "check_not_codes",
    "dtype_of",
    "dtypes_of",
    "read_once",
    "trainable_parameters",
    "with_names",
]


def trainable_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that can be trained, now or after unfreezing."""
    return [param for param in module.parameters() if param.requires_grad or param.is_floating_point()]


def dtypes_of(module: nn.Module) -> dict[torch.dtype, str]:
    """Return the dtypes of trained parameters, each with the name of one.  A collective of a pipeline's stages."""
    own = {param.dtype: name for name, param in module.named_parameters() if param.requires_grad}
    stages = pipeline_stages_of(module)
    if stages.size == 1:
        return own
    everywhere = zcomm.all_gather_object(
        {str(dtype).removeprefix("torch."): name for dtype, name in own.items()}, stages.group
    )
    return {getattr(torch, dtype): name for each in everywhere for dtype, name in each.items()}


def dtype_of(module: nn.Module) -> torch.dtype:
    """Return the dtype of the first floating-point parameter, as DeepSpeed does; float32 without one."""
    return next((param.dtype for param in module.parameters() if param.is_floating_point()), torch.float32)


def with_names(module: nn.Module, parameters: list[Any]) -> list[Any]:
    """Return the parameters or groups with the module's names, by which Muon tells embeddings from other matrices.

    If any of them is not a parameter of the module, none get names; the partition raises later.
    """
    names = {id(param): name for name, param in module.named_parameters()}
    groups = [{**item, "params": _to_list(item["params"])} if isinstance(item, dict) else item for item in parameters]
    members = [param for item in groups for param in (item["params"] if isinstance(item, dict) else [item])]
    if any(id(param) not in names for param in members):
        return groups

    def add_names(item: Any) -> Any:
        if isinstance(item, dict):
            pairs = [(names[id(param)], param) for param in item["params"]]
            return {**item, "params": pairs, **({} if pairs else {"param_names": []})}  # torch sees no names in []
        return names[id(item)], item

    return [add_names(item) for item in groups]


def read_once(given: Iterable[Any]) -> list[Any]:
    """Return the caller's parameters or groups as lists: `{"params": module.parameters()}` can be read once only."""
    return [
        {**item, "params": _to_list(item["params"])} if isinstance(item, dict) and "params" in item else item
        for item in given
    ]


def check_are_parameters(parameters: list[Any]) -> None:
    """Raise TypeError if parameters from `read_once` are not all tensors, (name, tensor) pairs or groups of them."""
    for item in parameters:
        for member in item["params"] if isinstance(item, dict) and "params" in item else [item]:
            tensor = member[-1] if isinstance(member, tuple) and member else member
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"model_parameters= holds {member!r:.60} ({type(member).__name__}): it takes tensors, "
                    '(name, tensor) pairs, or groups {"params": [...], ...}. Pass model.parameters()'
                )


def check_not_codes(module: nn.Module, parameters: list[Any]) -> None:
    """Raise ValueError if the optimizer is given codes of quantized weights alone, which have no gradient."""
    items = [
        member for each in parameters for member in (_to_list(each["params"]) if isinstance(each, dict) else [each])
    ]
    members = [item[-1] if isinstance(item, tuple) else item for item in items]
    if members and not any(param.is_floating_point() or param.is_complex() for param in members):
        names = {id(param): name for name, param in module.named_parameters()}
        raise ValueError(
            f"the optimizer has nothing to train: {names.get(id(members[0]), 'a tensor')} and all its other "
            f"parameters are {members[0].dtype}, the codes of quantized weights, which have no gradient. Add "
            "adapters (zengine.adapters.add_lora), and give their parameters."
        )


def _to_list(params: Any) -> list[Any]:
    """Return the members of a group, which may be a single parameter or a generator."""
    return [params] if isinstance(params, Tensor) else list(params)


def check_class_names(names: Iterable[str], module: nn.Module) -> None:
    """Check the class names of torch_autocast.lower_precision_safe_modules.

    An importable class that the model does not use is allowed: the default names four, and few models use them all.

    Raises:
        ValueError: a name is neither that of a class in `module` nor an importable path.
    """
    kinds = {type(child) for child in module.modules()}
    known = {kind.__name__ for kind in kinds} | {f"{kind.__module__}.{kind.__qualname__}" for kind in kinds}
    for name in names:
        if name not in known and not _is_importable(name):
            torchs = {f"torch.nn.{kind.__name__}" for kind in kinds if kind.__module__.startswith("torch.nn.")}
            close = difflib.get_close_matches(name, sorted(known | torchs), n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(
                f"torch_autocast.lower_precision_safe_modules names {name!r}, which is no class of this model and "
                f"cannot be imported: write a class as 'Linear' or 'torch.nn.Linear'.{hint}"
            )


def _is_importable(name: str) -> bool:
    path, _, last = name.rpartition(".")
    try:
        return bool(path) and isinstance(getattr(importlib.import_module(path), last, None), type)
    except ImportError:
        return False
