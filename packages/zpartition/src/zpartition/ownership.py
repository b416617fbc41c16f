"""Ownership of parameters: which partition owns the memory of a parameter, and which parameters may be partitioned.

A parameter's memory belongs to one partition at a time.  Ownership is stored in this module, not on the parameter,
and ends with the partition, closed or not.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn
from torch.nn import Parameter

from zpartition.core import PartitionState


class Removable(Protocol):
    """A hook, or a set of hooks."""

    def remove(self) -> None: ...


_owners: dict[int, weakref.ref[PartitionState]] = {}  # id(parameter) -> the partition that owns its memory


def acquire_ownership(partition: PartitionState, params: Sequence[Parameter], hooks: Sequence[Removable]) -> None:
    """Let `partition` own the memory of `params`; ownership and hooks end when it is garbage-collected."""
    for param in params:
        _owners[id(param)] = weakref.ref(partition)
    weakref.finalize(partition, forget, [id(param) for param in params], hooks)


def release_ownership(params: Sequence[Parameter]) -> None:
    """End the ownership of `params`."""
    for param in params:
        _owners.pop(id(param), None)


def named_groups(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, int]:
    """Return the parameter group of each parameter to partition, by name."""
    names = {id(param): name for name, param in module.named_parameters()}
    if optimizer is None:
        return {name: 0 for name, param in module.named_parameters() if param.requires_grad}
    groups: dict[str, int] = {}
    for index, param_group in enumerate(optimizer.param_groups):
        for position, param in enumerate(param_group["params"]):
            if id(param) not in names:
                raise ValueError(
                    f"parameter {position} of the optimizer's group {index}, shape {tuple(param.shape)}, is not a "
                    "parameter of the module. Build the optimizer from this module's parameters(). (An optimizer "
                    "that was partitioned before keeps those shards, also after close(): create a new one, and "
                    "transfer its state in a checkpoint.)"
                )
            if param.requires_grad:
                groups[names[id(param)]] = index
    return groups


def owner_of(param: Parameter) -> PartitionState | None:
    """Return the living partition that owns the memory of `param`."""
    found = _owners.get(id(param))
    owner = None if found is None else found()
    return owner if owner is not None and owner.owns(param) else None


def acquirer_of(param: Parameter) -> PartitionState | None:
    """Return the living partition that acquired `param`: a faster `owner_of`."""
    found = _owners.get(id(param))
    return None if found is None else found()


def check_not_owned(name: str, param: Parameter) -> None:
    """Raise ValueError if a living partition owns the memory of `param`."""
    if owner_of(param) is not None:
        raise ValueError(
            f"parameter {name} is partitioned already: close() the partition (or the engine) that owns the module "
            "before you partition it again"
        )


def check_has_weights(name: str, param: Parameter) -> None:
    """Raise ValueError for a hollow parameter: its stage 3 partition ended without its weights."""
    is_hollow = param.dim() > 0 and param.numel() > 1 and not any(param.stride()) and param.is_floating_point()
    if is_hollow and not param.is_meta and bool(param.detach().as_strided((), ()).isnan()):
        raise ValueError(
            f"parameter {name} has no weights: its partition was closed with keep_weights=False, or could not be "
            "completed. Build the module again, or load its weights."
        )


def forget(param_ids: list[int], hooks: Sequence[Removable]) -> None:
    """Remove the hooks and the ownership of a partition that was dropped without close()."""
    for hook in hooks:
        hook.remove()
    for param_id in param_ids:
        if (owner := _owners.get(param_id)) is not None and owner() is None:
            del _owners[param_id]


def one_device(params: dict[str, Parameter]) -> torch.device:
    """Return the device of all `params`.  Raises ValueError for several devices, or complex parameters."""
    devices: dict[torch.device, str] = {}
    for name, param in params.items():
        devices.setdefault(param.device, name)
        if param.is_complex():
            raise ValueError(f"parameter {name} is {param.dtype}; complex parameters cannot be partitioned")
    if len(devices) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ValueError(f"all parameters must be on one device; found {places}. Move the module first.")
    return next(iter(devices), torch.device("cpu"))
