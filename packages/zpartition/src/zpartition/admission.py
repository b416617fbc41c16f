"""What may be partitioned, and who has claimed it.

A parameter's memory can belong to one partition at a time; the claim lives here and not on the parameter, and goes
away with the partition, closed or not.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn
from torch.nn import Parameter

if TYPE_CHECKING:
    from zpartition.partition import Partition


class Removable(Protocol):
    """A hook, or something that holds some."""

    def remove(self) -> None: ...


_owners: dict[int, weakref.ref[Partition]] = {}  # id(parameter) -> the partition that owns its memory


def claim(partition: Partition, params: Sequence[Parameter], hooks: Sequence[Removable]) -> None:
    """Note that `partition` owns the memory of `params`; when it dies, claims and hooks go with it."""
    for param in params:
        _owners[id(param)] = weakref.ref(partition)
    weakref.finalize(partition, forget, [id(param) for param in params], hooks)


def disclaim(params: Sequence[Parameter]) -> None:
    """`params` belong to nobody."""
    for param in params:
        _owners.pop(id(param), None)


def named_groups(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, int]:
    """Parameter group of each parameter to partition, by name."""
    names = {id(param): name for name, param in module.named_parameters()}
    if optimizer is None:
        return {name: 0 for name, param in module.named_parameters() if param.requires_grad}
    groups: dict[str, int] = {}
    for index, param_group in enumerate(optimizer.param_groups):
        for position, param in enumerate(param_group["params"]):
            if id(param) not in names:
                raise ValueError(
                    f"parameter {position} of the optimizer's group {index}, shape {tuple(param.shape)}, is not a "
                    "parameter of the module. Build the optimizer from this module's parameters(). (One that was "
                    "partitioned before keeps the shards of that time, also after close(): make a new one; its "
                    "state travels in a checkpoint.)"
                )
            if param.requires_grad:
                groups[names[id(param)]] = index
    return groups


def owner_of(param: Parameter) -> Partition | None:
    """The living partition that owns the memory of `param`."""
    found = _owners.get(id(param))
    owner = None if found is None else found()
    return owner if owner is not None and owner.owns(param) else None


def claimant_of(param: Parameter) -> Partition | None:
    """The living partition that has claimed `param`: `owner_of` at once, for those who go through many."""
    found = _owners.get(id(param))
    return None if found is None else found()


def refuse_owned(name: str, param: Parameter) -> None:
    """ValueError if a living partition owns the memory of `param`."""
    if owner_of(param) is not None:
        raise ValueError(
            f"parameter {name} is partitioned already: close() the partition (or the engine) that owns the module "
            "before partitioning it again"
        )


def refuse_hollow(name: str, param: Parameter) -> None:
    """ValueError for what stage 3 leaves of a parameter when a partition ends without its weights."""
    is_hollow = param.dim() > 0 and param.numel() > 1 and not any(param.stride()) and param.is_floating_point()
    if is_hollow and not param.is_meta and bool(param.detach().as_strided((), ()).isnan()):
        raise ValueError(
            f"parameter {name} has no weights: the partition that had them was closed with keep_weights=False, or "
            "could not be completed. Build the module again, or load its weights."
        )


def forget(param_ids: list[int], hooks: Sequence[Removable]) -> None:
    """A partition was dropped without close(): its hooks and its claim on the parameters go with it."""
    for hook in hooks:
        hook.remove()
    for param_id in param_ids:
        if (owner := _owners.get(param_id)) is not None and owner() is None:
            del _owners[param_id]


def one_device(params: dict[str, Parameter]) -> torch.device:
    """Where all of `params` live; ValueError if that is several places, or if one of them is complex."""
    devices: dict[torch.device, str] = {}
    for name, param in params.items():
        devices.setdefault(param.device, name)
        if param.is_complex():
            raise ValueError(f"parameter {name} is {param.dtype}; complex parameters cannot be partitioned")
    if len(devices) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ValueError(f"all parameters must live on one device, found {places}. Move the module first.")
    return next(iter(devices), torch.device("cpu"))
