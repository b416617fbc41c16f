"""Parameters without memory that look as if they were on a device.

A parameter on the meta device says so, and code that makes something new beside it (a larger embedding, an adapter)
makes that on the meta device too, where nothing says what its values are.  Hidden, a parameter is one NaN on a real
device, expanded to its shape, as the weights of stage 3 are while they rest; what it was waits in a table, and comes
back when the tape is asked for.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

from zpartition import _compat

__all__ = ["hide", "make_hollow", "show"]

# id(parameter) -> (the parameter, what it was: a meta tensor)
_hidden: dict[int, tuple[weakref.ref[Parameter], Tensor]] = {}


def make_hollow(tensor: Tensor, device: torch.device) -> Tensor:
    """Give a meta tensor, keeping its identity, one NaN on `device` for all elements (0 for integers).

    Returns what it was.
    """
    value = torch.nan if tensor.is_floating_point() else 0
    hollow = torch.full((), value, dtype=tensor.dtype, device=device).expand(tensor.shape)
    if isinstance(tensor, Parameter):
        hollow = Parameter(hollow, requires_grad=tensor.requires_grad)
    _compat.swap(tensor, hollow)
    return hollow


def hide(params: Iterable[Parameter], device: torch.device) -> None:
    """Let these meta parameters say that they are on `device`; nothing happens where that is the meta device."""
    if device.type == "meta":
        return
    for param in {id(param): param for param in params}.values():
        forget = functools.partial(_forget, id(param))
        _hidden[id(param)] = (weakref.ref(param, forget), make_hollow(param, device))


def show(params: Iterable[Tensor]) -> list[tuple[Parameter, torch.device]]:
    """Let those of `params` that are hidden be on the meta device again; returns them, and where they had been."""
    found = []
    for param in list(params):
        known = _hidden.get(id(param))
        if known is None or known[0]() is not param or not isinstance(param, Parameter):
            continue
        del _hidden[id(param)]
        device, is_trained = param.device, param.requires_grad
        _compat.swap(param, known[1])
        param.requires_grad_(is_trained)
        found.append((param, device))
    return found


def _forget(key: int, _: object) -> None:
    _hidden.pop(key, None)
