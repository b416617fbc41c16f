"""Tied weights across stages: broadcast before a batch, their gradients reduced after it.

The owner sends its weights to the ranks of the other stages.  These compute with copies that no optimizer sees, and
send back their gradients, which the owner accumulates by one more backward of its parameter.
"""

from __future__ import annotations

from typing import final

import attrs
import torch
from torch import Tensor, nn

from zpartition.pipeline.channels import Channels
from zpartition.pipeline.module import PipelineModule

_EDGE = 1 << 20  # far above those of stages


@final
@attrs.define(eq=False)
class TiedWeights:
    """Tied weights of this rank, owned and copied."""

    module: PipelineModule
    channels: Channels

    @property
    def has_copies(self) -> bool:
        """True if this rank owns weights that another one copies: then a batch ends with one more backward here."""
        return any(self._copy_ranks(key) for key in self.module.owned)

    def broadcast(self) -> None:
        """Send the owners' weights to the copies.  All ranks of the pipeline call it."""
        for key, number in self._keys():
            owner = self._rank(self.module.ties.owner[key])
            if owner == self.module.pipeline_position.rank:
                for rank in self._copy_ranks(key):
                    for place, param in enumerate(self._params(self.module.owned[key])):
                        self.channels.send(param.detach(), rank, _EDGE + number * 1000 + place)
            elif key in self.module.tied_copies:
                for place, (holder, name) in enumerate(_parameter_slots(self.module.tied_copies[key])):
                    _set_parameter(holder, name, self.channels.receive(owner, _EDGE + number * 1000 + place))

    def reduce_gradients(self) -> None:
        """Add the gradients of the copies to those of the owners."""
        for key, number in self._keys():
            owner = self._rank(self.module.ties.owner[key])
            if owner == self.module.pipeline_position.rank:
                params = self._params(self.module.owned[key])
                for rank in self._copy_ranks(key):
                    got = [self.channels.receive(rank, _EDGE + number * 1000 + at) for at in range(len(params))]
                    pairs = [(param, each) for param, each in zip(params, got) if param.requires_grad]
                    torch.autograd.backward([param for param, _ in pairs], [each for _, each in pairs])
            elif key in self.module.tied_copies:
                for place, param in enumerate(self._params(self.module.tied_copies[key])):
                    gradient = torch.zeros_like(param) if param.grad is None else param.grad
                    self.channels.send(gradient.detach(), owner, _EDGE + number * 1000 + place)
                    param.grad = None

    def _keys(self) -> list[tuple[str, int]]:
        return [(key, number) for number, key in enumerate(sorted(self.module.ties.owner))]

    def _rank(self, stage: int) -> int:
        return stage % self.module.pipeline_position.num_ranks

    def _copy_ranks(self, key: str) -> list[int]:
        ranks = {self._rank(stage) for stage in self.module.ties.users[key]}
        return sorted(ranks - {self._rank(self.module.ties.owner[key])})

    def _params(self, module: nn.Module) -> list[nn.Parameter]:
        return list(module.parameters())


def _parameter_slots(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the (module, name) of each parameter, in the order of `module.parameters()`."""
    names = [name for name, _ in module.named_parameters()]
    return [(module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]


def _set_parameter(holder: nn.Module, name: str, value: Tensor) -> None:
    """Set the parameter's data, or replace it if it has no memory yet (built inside `Init`)."""
    param = holder.get_parameter(name)
    if param.is_meta:
        setattr(holder, name, nn.Parameter(value.detach(), requires_grad=param.requires_grad))
        return
    param.data, param.grad = value, None
