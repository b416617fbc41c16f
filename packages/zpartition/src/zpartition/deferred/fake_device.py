"""Fake device: parameters without memory that report a real device.

A parameter on the meta device makes code that creates tensors beside it (a larger embedding, an adapter) create them
on the meta device, too, where nothing records their values.  With a fake device, a parameter is one NaN on a real
device, expanded to its shape, like sharded weights of stage 3.  Its meta tensor is kept in a table and restored when
the init recording is used.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

from zpartition import _compat

__all__ = ["clear_fake_device", "make_hollow", "set_fake_device"]

# id(parameter) -> (the parameter, its meta tensor)
_faked: dict[int, tuple[weakref.ref[Parameter], Tensor]] = {}


def make_hollow(tensor: Tensor, device: torch.device) -> Tensor:
    """Replace a meta tensor in place by one NaN on `device` for all elements (0 for integers).

    Returns the meta tensor.
    """
    value = torch.nan if tensor.is_floating_point() else 0
    hollow = torch.full((), value, dtype=tensor.dtype, device=device).expand(tensor.shape)
    if isinstance(tensor, Parameter):
        hollow = Parameter(hollow, requires_grad=tensor.requires_grad)
    _compat.swap(tensor, hollow)
    return hollow


def set_fake_device(params: Iterable[Parameter], device: torch.device) -> None:
    """Let these meta parameters report `device`; does nothing if it is the meta device."""
    if device.type == "meta":
        return
    for param in {id(param): param for param in params}.values():
        forget = functools.partial(_forget, id(param))
        _faked[id(param)] = (weakref.ref(param, forget), make_hollow(param, device))


def clear_fake_device(params: Iterable[Tensor]) -> list[tuple[Parameter, torch.device]]:
    """Restore the meta tensors of those `params` that have a fake device; returns them with that device."""
    found: list[tuple[Parameter, torch.device]] = []
    for param in list(params) if _faked else ():
        known = _faked.get(id(param))
        if known is None or known[0]() is not param or not isinstance(param, Parameter):
            continue
        del _faked[id(param)]
        device, is_trained = param.device, param.requires_grad
        _compat.swap(param, known[1])
        param.requires_grad_(is_trained)
        found.append((param, device))
    return found


def _forget(key: int, _: object) -> None:
    _faked.pop(key, None)
