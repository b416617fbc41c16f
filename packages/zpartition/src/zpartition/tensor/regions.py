"""Modules between split layers: weights that each rank uses for a part, and where activations are split or joined.

Any module will do (a norm of somebody's own): its class is exchanged for one made of it, which adds to `forward` and
to nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zpartition.tensor import functions as messages
from zpartition.tensor.entrance import Entrance

__all__ = ["gather_behind", "scatter_behind", "sum_gradients"]


_made: dict[tuple[type, type], type[nn.Module]] = {}  # modules of one class become modules of one class


class _Region:
    """Keeps what leads to the other ranks."""

    entrance: Entrance


class _Summed(_Region):
    """The module's own weights are whole; while it runs they are read as copies whose gradients are summed.

    A forward hook of torch runs outside of `forward` and sees the parameters themselves.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        cell = self.entrance.cell
        own = {n: p for n, p in self.named_parameters(recurse=False) if p.requires_grad}
        if cell.size == 1 or not torch.is_grad_enabled() or not own:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        copies = messages.copy_all([getattr(self, name) for name in own], cell)
        self.__dict__["_copies"] = dict(zip(own, copies))
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            del self.__dict__["_copies"]

    def __getattr__(self, name: str) -> Any:
        copies = self.__dict__.get("_copies")
        if copies is not None and name in copies:
            return copies[name]
        return super().__getattr__(name)  # type: ignore[misc]


class _SummedGathered(_Summed):
    """The same, and all ranks' tokens come out, for split layers."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _first(super().forward(*args, **kwargs), self.entrance.gather)


class _Scattered(_Region):
    """Each rank goes on with its tokens of the first tensor that comes out."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _first(super().forward(*args, **kwargs), self._own)  # type: ignore[misc]

    def _own(self, x: Tensor) -> Tensor:
        self.entrance.scattering(x, _module(self))
        return self.entrance.leave_alone(x)


class _Gathered(_Region):
    """Every rank goes on with all tokens of the first tensor that comes out."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _first(super().forward(*args, **kwargs), self._joined)  # type: ignore[misc]

    def _joined(self, x: Tensor) -> Tensor:
        cell, dim = self.entrance.cell, self.entrance.sequence_dim
        self.entrance.draws.whole()
        return x if cell.size == 1 or dim < 0 else messages.all_tokens(x, cell, dim)


def sum_gradients(module: nn.Module, entrance: Entrance, gathers: bool) -> None:
    """From now on the gradients of the module's own parameters are sums over the ranks; see Summed."""
    _become(_SummedGathered if gathers else _Summed, module, entrance)


def scatter_behind(module: nn.Module, entrance: Entrance) -> None:
    """From now on what comes out of `module` is this rank's tokens."""
    _become(_Scattered, module, entrance)


def gather_behind(module: nn.Module, entrance: Entrance) -> None:
    """From now on what comes out of `module` is all tokens."""
    _become(_Gathered, module, entrance)


def _become(region: type[_Region], module: nn.Module, entrance: Entrance) -> None:
    module.__class__ = _mixed(region, type(module))
    module.entrance = entrance  # type: ignore[assignment]


def _mixed(region: type[_Region], kind: type[nn.Module]) -> type[nn.Module]:
    if (region, kind) not in _made:
        _made[region, kind] = type(f"{region.__name__.strip('_')}{kind.__name__}", (region, kind), {})
    return _made[region, kind]


def _module(region: Any) -> nn.Module:
    """The module that the region has become."""
    found: nn.Module = region
    return found


def _first(out: Any, change: Any) -> Any:
    """`out` with its first tensor changed, where modules return several things."""
    return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)
