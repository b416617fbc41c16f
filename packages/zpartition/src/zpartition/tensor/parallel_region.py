"""Parallel region: where activations enter and leave split layers.  All layers of a model share one object.

Layers that read the same activations (q, k, v; gate, up) share one `copy` of them, so that their gradients are summed
and all-reduced once.  The last copied tensor is remembered while the original lives, which the caller holds in a
variable while it calls the neighbouring layers; so no tensor lives longer than it would.
"""

from __future__ import annotations

import copy
import functools
import weakref
from typing import Any, final

import attrs
import torch
from torch import Tensor, nn

from zpartition._compat import version
from zpartition.layout.model_parallel import ModelParallelGroup
from zpartition.tensor import functions
from zpartition.tensor.random_state import TPRandomState

__all__ = ["ParallelRegion"]


@attrs.frozen(eq=False)
class _EnteredTensor:
    """A tensor that entered, and its copy."""

    x: weakref.ref[Tensor]
    version: int  # of x, which changes with in-place edits
    entered: Tensor


@final
@attrs.define(eq=False)
class ParallelRegion:
    """Boundary between split layers and activations that are equal on all ranks, or split along `sequence_dim`."""

    mp_group: ModelParallelGroup
    sequence_dim: int = -1  # along which activations between layers are split; -1: they are whole on every rank
    seen: _EnteredTensor | None = None  # the last one
    random_state: TPRandomState = attrs.field()  # random numbers between layers and inside

    @random_state.default
    def _default_random_state(self) -> TPRandomState:
        return TPRandomState(self.mp_group)

    def enter(self, x: Tensor) -> Tensor:
        """Copy `x`, which is equal on all ranks, into the region.

        If activations are split by tokens, they were gathered before (`gather`), whose backward sums.
        """
        if self.mp_group.size == 1 or self.sequence_dim >= 0 or not torch.is_grad_enabled():
            return x
        if torch.compiler.is_compiling():
            return functions.copy(x, self.mp_group)
        seen = self.seen
        if seen is None or seen.x() is not x or seen.version != version(x):
            forget = functools.partial(_forget, weakref.ref(self))
            seen = self.seen = _EnteredTensor(weakref.ref(x, forget), version(x), functions.copy(x, self.mp_group))
        return seen.entered

    def gather(self, x: Tensor) -> Tensor:
        """Gather all tokens, of which this rank holds some."""
        if self.mp_group.size == 1 or self.sequence_dim < 0:
            return x
        return functions.gather_tokens(x, self.mp_group, self.sequence_dim)

    def reduce(self, partial: Tensor) -> Tensor:
        """Sum the ranks' `partial`, which is overwritten; returns this rank's tokens if tokens are split."""
        if self.mp_group.size == 1:
            return partial
        if self.sequence_dim < 0:
            return functions.reduce(partial, self.mp_group)
        return functions.reduce_scatter_tokens(partial, self.mp_group, self.sequence_dim)

    def begin_sharded(self, x: Tensor, layer: nn.Module) -> None:
        """Draw per-rank random numbers from now on: `layer`, which read `x`, outputs this rank's part."""
        if layer.training and self.sequence_dim < 0:
            self.random_state.diverge(x)

    def end_sharded(self) -> None:
        """Draw equal random numbers from now on: a layer is about to compute whole activations."""
        if self.sequence_dim < 0:
            self.random_state.restore()

    def begin_scattered(self, x: Tensor, layer: nn.Module) -> None:
        """Draw per-rank random numbers until tokens are joined: `x`, from `layer`, is about to be split by tokens."""
        if layer.training and self.mp_group.size > 1 and self.sequence_dim >= 0:
            self.random_state.diverge(x)

    def scatter(self, same: Tensor) -> Tensor:
        """Return this rank's tokens of activations that are equal on all ranks."""
        if self.mp_group.size == 1 or self.sequence_dim < 0:
            return same
        return functions.slice_tokens(same, self.mp_group, self.sequence_dim)

    def copy_weight(self, weight: Tensor) -> Tensor:
        """Copy a weight that is used between split layers: its gradients come from each rank's tokens."""
        return weight if self.sequence_dim < 0 else functions.copy(weight, self.mp_group)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelRegion:
        """Copy without remembered tensors."""
        return ParallelRegion(self.mp_group, self.sequence_dim, random_state=copy.deepcopy(self.random_state, memo))


def _forget(parallel_region: weakref.ref[ParallelRegion], _: object) -> None:
    """Forget the remembered tensor."""
    if (found := parallel_region()) is not None:
        found.seen = None
