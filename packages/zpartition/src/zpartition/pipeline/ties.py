"""Weights that several stages use: lent before a batch, their gradients collected after it.

The owner sends its weights to the other stages' ranks; these compute with copies that no optimizer sees, and send
back what gradients they got, which the owner takes as one more backward of its parameter.
"""

from __future__ import annotations

from typing import final

import attrs
import torch
from torch import Tensor, nn

from .module import PipelineModule
from .wires import Wires

_EDGE = 1 << 20  # far above those of stages


@final
@attrs.define(eq=False)
class TiedWeights:
    """This rank's side of all ties."""

    module: PipelineModule
    wires: Wires

    @property
    def collects(self) -> bool:
        """Whether this rank owns what another one borrows: then a batch ends with one more backward here."""
        return any(self._borrowers(key) for key in self.module.owned)

    def lend(self) -> None:
        """The weights of owners to the copies.  All ranks of the pipeline call it."""
        for key, number in self._keys():
            owner = self._rank(self.module.ties.owner[key])
            if owner == self.module.place.rank:
                for rank in self._borrowers(key):
                    for place, param in enumerate(self._params(self.module.owned[key])):
                        self.wires.send(param.detach(), rank, _EDGE + number * 1000 + place)
            elif key in self.module.borrowed:
                for place, (holder, name) in enumerate(_places(self.module.borrowed[key])):
                    _put(holder, name, self.wires.receive(owner, _EDGE + number * 1000 + place))

    def collect(self) -> None:
        """The gradients of copies to the owners."""
        for key, number in self._keys():
            owner = self._rank(self.module.ties.owner[key])
            if owner == self.module.place.rank:
                params = self._params(self.module.owned[key])
                for rank in self._borrowers(key):
                    got = [self.wires.receive(rank, _EDGE + number * 1000 + at) for at in range(len(params))]
                    pairs = [(param, each) for param, each in zip(params, got) if param.requires_grad]
                    torch.autograd.backward([param for param, _ in pairs], [each for _, each in pairs])
            elif key in self.module.borrowed:
                for place, param in enumerate(self._params(self.module.borrowed[key])):
                    gradient = torch.zeros_like(param) if param.grad is None else param.grad
                    self.wires.send(gradient.detach(), owner, _EDGE + number * 1000 + place)
                    param.grad = None

    def _keys(self) -> list[tuple[str, int]]:
        return [(key, number) for number, key in enumerate(sorted(self.module.ties.owner))]

    def _rank(self, stage: int) -> int:
        return stage % self.module.place.num_ranks

    def _borrowers(self, key: str) -> list[int]:
        ranks = {self._rank(stage) for stage in self.module.ties.users[key]}
        return sorted(ranks - {self._rank(self.module.ties.owner[key])})

    def _params(self, module: nn.Module) -> list[nn.Parameter]:
        return list(module.parameters())


def _places(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Where the parameters of `module` are, in the order of `module.parameters()`."""
    names = [name for name, _ in module.named_parameters()]
    return [(module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]


def _put(holder: nn.Module, name: str, value: Tensor) -> None:
    """Into the parameter, or in its place where it has no memory yet (it was built inside `Init`)."""
    param = holder.get_parameter(name)
    if param.is_meta:
        setattr(holder, name, nn.Parameter(value.detach(), requires_grad=param.requires_grad))
        return
    param.data, param.grad = value, None
