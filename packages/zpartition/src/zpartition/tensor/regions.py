"""Modules between split layers: replicated weights with summed gradients, and points where tokens are split or
    joined.

Any module can be converted (a custom norm, say): its class is replaced by a subclass that extends `forward` only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zpartition.tensor import functions as messages
from zpartition.tensor.parallel_region import ParallelRegion

__all__ = ["gather_output", "scatter_output", "sum_gradients"]


_made: dict[tuple[type, type], type[nn.Module]] = {}  # by region and class of the module


class _BoundaryModule:
    """A module converted for a parallel region, which it keeps."""

    parallel_region: ParallelRegion


class _GradSummed(_BoundaryModule):
    """Replicated weights: while the module runs they are read as copies whose gradients are all-reduced.

    A forward hook of torch runs outside of `forward` and sees the parameters themselves.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        mp_group = self.parallel_region.mp_group
        own = {n: p for n, p in self.named_parameters(recurse=False) if p.requires_grad}
        if mp_group.size == 1 or not torch.is_grad_enabled() or not own:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        copies = messages.copy_all([getattr(self, name) for name in own], mp_group)
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


class _GradSummedGathered(_GradSummed):
    """The same, and all ranks' tokens are gathered from the output, for split layers."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _change_first(super().forward(*args, **kwargs), self.parallel_region.gather)


class _OutputScattered(_BoundaryModule):
    """Split the first output tensor by tokens."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _change_first(super().forward(*args, **kwargs), self._own)  # type: ignore[misc]

    def _own(self, x: Tensor) -> Tensor:
        self.parallel_region.begin_scattered(x, _module(self))
        return self.parallel_region.scatter(x)


class _OutputGathered(_BoundaryModule):
    """Gather all tokens of the first output tensor."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _change_first(super().forward(*args, **kwargs), self._joined)  # type: ignore[misc]

    def _joined(self, x: Tensor) -> Tensor:
        mp_group, dim = self.parallel_region.mp_group, self.parallel_region.sequence_dim
        self.parallel_region.random_state.restore()
        return x if mp_group.size == 1 or dim < 0 else messages.all_tokens(x, mp_group, dim)


def sum_gradients(module: nn.Module, parallel_region: ParallelRegion, gathers: bool) -> None:
    """Sum the gradients of the module's own parameters over the ranks; see NormShard."""
    _convert(_GradSummedGathered if gathers else _GradSummed, module, parallel_region)


def scatter_output(module: nn.Module, parallel_region: ParallelRegion) -> None:
    """Split the output of `module` by tokens."""
    _convert(_OutputScattered, module, parallel_region)


def gather_output(module: nn.Module, parallel_region: ParallelRegion) -> None:
    """Gather the tokens of the output of `module`."""
    _convert(_OutputGathered, module, parallel_region)


def _convert(region: type[_BoundaryModule], module: nn.Module, parallel_region: ParallelRegion) -> None:
    module.__class__ = _region_class(region, type(module))
    module.parallel_region = parallel_region  # type: ignore[assignment]


def _region_class(region: type[_BoundaryModule], kind: type[nn.Module]) -> type[nn.Module]:
    if (region, kind) not in _made:
        _made[region, kind] = type(f"{region.__name__.strip('_')}{kind.__name__}", (region, kind), {})
    return _made[region, kind]


def _module(region: Any) -> nn.Module:
    """Return the region as the module that it is."""
    found: nn.Module = region
    return found


def _change_first(out: Any, change: Any) -> Any:
    """Apply `change` to the first tensor of `out`."""
    return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)
