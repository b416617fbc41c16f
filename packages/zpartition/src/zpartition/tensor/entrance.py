"""How activations come into split layers and leave them: one object that all layers of a model share.

Layers that read the same activations (q, k, v; gate, up) share one `copy` of them, so that the sum of their gradients
is all-reduced once.  What was copied last is remembered as long as the original lives, which those who call a layer
hold in a variable while its neighbours are called; so nothing is kept alive that would not be.
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
from zpartition.cells import Cell
from zpartition.tensor import functions
from zpartition.tensor.draws import Draws

__all__ = ["Entrance"]


@attrs.frozen(eq=False)
class _Seen:
    """A tensor that came in, and what it became."""

    x: weakref.ref[Tensor]
    version: int  # of x: edits in place make it another
    entered: Tensor


@final
@attrs.define(eq=False)
class Entrance:
    """Between activations that ranks have alike (or tokens of, where `sequence_dim` is one) and split layers."""

    cell: Cell
    sequence_dim: int = -1  # along which activations between layers are split; -1: they are whole on every rank
    seen: _Seen | None = None  # what came in last
    draws: Draws = attrs.field()  # random numbers between layers and inside

    @draws.default
    def _draws(self) -> Draws:
        return Draws(self.cell)

    def enter(self, x: Tensor) -> Tensor:
        """`x`, which all ranks have alike, to be used by each in its own way.

        Where activations are split by tokens, they were gathered before (`gather`), whose backward sums.
        """
        if self.cell.size == 1 or self.sequence_dim >= 0 or not torch.is_grad_enabled():
            return x
        if torch.compiler.is_compiling():
            return functions.copy(x, self.cell)
        seen = self.seen
        if seen is None or seen.x() is not x or seen.version != version(x):
            forget = functools.partial(_forget, weakref.ref(self))
            seen = self.seen = _Seen(weakref.ref(x, forget), version(x), functions.copy(x, self.cell))
        return seen.entered

    def gather(self, x: Tensor) -> Tensor:
        """All tokens, of which this rank has some, to be used by each rank in its own way."""
        if self.cell.size == 1 or self.sequence_dim < 0:
            return x
        return functions.gather_tokens(x, self.cell, self.sequence_dim)

    def leave(self, partial: Tensor) -> Tensor:
        """The sum of the ranks' `partial`, which is overwritten; of this rank's tokens."""
        if self.cell.size == 1:
            return partial
        if self.sequence_dim < 0:
            return functions.reduce(partial, self.cell)
        return functions.scatter_sums(partial, self.cell, self.sequence_dim)

    def parted(self, x: Tensor, layer: nn.Module) -> None:
        """`layer`, which read `x`, goes on with a part of its outputs: what is drawn from now on is of that part."""
        if layer.training and self.sequence_dim < 0:
            self.draws.apart(x)

    def joining(self) -> None:
        """A layer is about to make whole activations again."""
        if self.sequence_dim < 0:
            self.draws.whole()

    def scattering(self, x: Tensor, layer: nn.Module) -> None:
        """Tokens of `x`, out of `layer`, are about to be shared out: until they are joined, each rank has its own."""
        if layer.training and self.cell.size > 1 and self.sequence_dim >= 0:
            self.draws.apart(x)

    def leave_alone(self, same: Tensor) -> Tensor:
        """This rank's tokens of what all ranks have alike."""
        if self.cell.size == 1 or self.sequence_dim < 0:
            return same
        return functions.own_tokens(same, self.cell, self.sequence_dim)

    def share(self, weight: Tensor) -> Tensor:
        """A weight that is used for activations between layers: its gradients come from each rank's tokens."""
        return weight if self.sequence_dim < 0 else functions.copy(weight, self.cell)

    def __deepcopy__(self, memo: dict[int, Any]) -> Entrance:
        """Of the same ranks, having seen nothing."""
        return Entrance(self.cell, self.sequence_dim, draws=copy.deepcopy(self.draws, memo))


def _forget(entrance: weakref.ref[Entrance], _: object) -> None:
    """What came in last is gone."""
    if (found := entrance()) is not None:
        found.seen = None
