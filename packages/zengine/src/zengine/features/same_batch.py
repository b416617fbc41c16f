"""Ranks that share the layers of one model are compared in the batches they run.

Tensor ranks with different batches do not fail: each layer adds up parts of different activations, and the model
trains on noise.  The first steps are compared, where the mistakes of a script show, and every `EVERY`-th after them
(ranks may shuffle a second epoch in different ways).  The comparison costs no message, see `zengine.engine.drift`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from zengine.data.tree import named_tensors
from zengine.engine.digest import fingerprint
from zengine.engine.feature import Feature

if TYPE_CHECKING:
    from zengine.engine.drift import Facts
    from zengine.engine.parts import Run

FIRST, EVERY = 10, 100  # steps that are compared: these many at first, then one in so many


@final
class SameBatch(Feature):
    """Compares the tensors that forward is given over the tensor ranks, as a topic of `zengine.engine.drift`.

    names: of positional arguments; default: those of the module's forward.
    """

    cure = (
        "These ranks share the layers of one model, so they need the same batches: choose them by the data-parallel "
        "rank, run.parts.groups.get_data_parallel_rank(), which is the same on all of them."
    )

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.names = tuple(names)
        self.ranks: tuple[int, ...] = ()
        self.num_steps = 0  # seen by this object: a run that goes on is compared from its first steps on
        self.num_forwards = 0  # of the running step
        self.found: dict[str, tuple[str, int | Tensor]] = {}  # in those, by argument: what it is, and a fingerprint
        self.compared = self.found  # those of the last boundary

    def attach(self, run: Run) -> None:
        self.names = self.names or _positional(run.module)
        self.ranks = run.parts.groups.ranks("tensor")
        run.parts.drift.add(self)

    def forward_begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if torch.is_grad_enabled() and (self.num_steps < FIRST or self.num_steps % EVERY == 0):
            names = self.names + tuple(f"argument {index}" for index in range(len(self.names), len(args)))
            for name, value in (*zip(names, args), *kwargs.items()):
                for path, tensor in named_tensors(value, name):
                    self._note(f"{path} of forward pass {self.num_forwards + 1} of the step", tensor)
            self.num_forwards += 1
        return args, kwargs

    def digest(self, *, any_unused: bool) -> int | Tensor:
        """Of all tensors since the last boundary, which begins another step, however it ends."""
        self.compared, self.found, self.num_forwards = self.found, {}, 0
        self.num_steps += 1
        return sum((found for _, found in self.compared.values()), start=0)

    def facts(self) -> Facts:
        """Each tensor."""
        return {
            what: ([shown, int(found)], f"{shown} with digest {int(found):08x}")
            for what, (shown, found) in self.compared.items()
        }

    def _note(self, what: str, tensor: Tensor) -> None:
        found = fingerprint(tensor, what) & 0xFFFFFFFF
        shown = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        self.found[what] = shown, int(found) if found.device.type == "cpu" else found


def _positional(module: torch.nn.Module) -> tuple[str, ...]:
    """Names of the arguments that forward takes by their place."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    return tuple(each.name for each in parameters if each.kind in kinds)
