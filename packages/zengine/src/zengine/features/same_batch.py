"""Batch comparison over tensor ranks, which split the layers of one model and need equal batches.

Tensor ranks with different batches do not fail: each layer adds up parts of different activations, and the model
trains on noise.  The first steps are compared, where mistakes of a script show, and every `EVERY`-th later one (ranks
may shuffle a second epoch differently).  The comparison needs no message, see `zengine.engine.drift`.
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

FIRST, EVERY = 10, 100  # compared steps: the first FIRST, then every EVERY-th


@final
class SameBatch(Feature):
    """Compares forward's tensor arguments over the tensor ranks, as a topic of `zengine.engine.drift`.

    names: names of positional arguments; default: those of the module's forward.
    """

    hint = (
        "These ranks split the layers of one model, so they need the same batches: select data by the data-parallel "
        "rank, engine.parts.groups.get_data_parallel_rank(), which is equal on all of them."
    )

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.names = tuple(names)
        self.ranks: tuple[int, ...] = ()
        self.num_steps = 0  # of this process: a resumed run is compared from its first steps on
        self.num_forwards = 0  # of the running step
        self.found: dict[
            str, tuple[str, int | Tensor]
        ] = {}  # of the running step, by argument: shape and dtype, fingerprint
        self.compared = self.found  # the same, of the last boundary

    def attach(self, run: Run) -> None:
        self.names = self.names or _positional_names(run.module)
        self.ranks = run.parts.groups.ranks("tensor")
        run.parts.drift.add(self)

    def forward_begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if torch.is_grad_enabled() and (self.num_steps < FIRST or self.num_steps % EVERY == 0):
            names = self.names + tuple(f"argument {index}" for index in range(len(self.names), len(args)))
            for name, value in (*zip(names, args), *kwargs.items()):
                for path, tensor in named_tensors(value, name):
                    self._add(f"{path} of forward pass {self.num_forwards + 1} of the step", tensor)
            self.num_forwards += 1
        return args, kwargs

    def digest(self, *, any_unused: bool) -> int | Tensor:
        """Return the sum of the fingerprints since the last boundary, and begin another step."""
        self.compared, self.found, self.num_forwards = self.found, {}, 0
        self.num_steps += 1
        return sum((found for _, found in self.compared.values()), start=0)

    def facts(self) -> Facts:
        """Return shape, dtype and fingerprint of each tensor."""
        return {
            name: ([text, int(found)], f"{text} with digest {int(found):08x}")
            for name, (text, found) in self.compared.items()
        }

    def _add(self, name: str, tensor: Tensor) -> None:
        found = fingerprint(tensor, name) & 0xFFFFFFFF
        text = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        self.found[name] = text, int(found) if found.device.type == "cpu" else found


def _positional_names(module: torch.nn.Module) -> tuple[str, ...]:
    """Return the names of forward's positional arguments."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    return tuple(each.name for each in parameters if each.kind in kinds)
