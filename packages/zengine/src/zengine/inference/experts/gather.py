"""The experts of all ranks, from stacks and separate layers that are sharded over expert ranks.

Recognition compares a mixture with what the module computes, and so needs all of its experts, one layer at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

import zcomm
from zengine.inference.experts.separate import SeparateExperts
from zengine.inference.quantized_modules import QuantizedLinear
from zpartition import ModelParallelGroup, expert_ranks_of
from zpartition.experts import whole_hf_experts
from zprecision.quant import PackedTensor, QuantizedTensor

__all__ = ["whole_experts"]

_KINDS: dict[str, type[PackedTensor] | type[QuantizedTensor]] = {
    each.__name__: each for each in (PackedTensor, QuantizedTensor)
}


def whole_experts(module: nn.Module) -> nn.Module:
    """Return a copy of sharded experts with those of all ranks; other modules as they are.  Collective.

    The copy has memory of its own, but for this rank's layers if the experts are separate.
    """
    group = expert_ranks_of(module)
    if group.size == 1 or not isinstance(module, SeparateExperts):
        return whole_hf_experts(module) or module
    layers: dict[str, dict[int, nn.Module]] = {}
    for name in module.stack.names:
        own: Any = getattr(module, name)
        mine = {int(number): _Stored.of(layer) for number, layer in own.items()}
        like = own[str(module.first)].weight.device
        layers[name] = {
            number: own[str(number)] if number in mine else stored.layer()
            for number, stored in _of_all_ranks(mine, group, like).items()
        }
    return SeparateExperts(module.stack, module.act_fn, module.choice, layers)


@attrs.frozen(eq=False)
class _Stored:
    """The weight of a layer."""

    kind: str  # class of the weight
    parts: Mapping[str, Tensor]

    @classmethod
    def of(cls, layer: Any) -> _Stored:
        weight = layer.weight
        parts = weight.state_dict() if isinstance(layer, QuantizedLinear) else {"weight": weight.detach()}
        return cls(type(weight).__name__, parts)

    def header(self) -> list[Any]:
        """Return what says how bytes are read."""
        return [self.kind, [[name, str(each.dtype), list(each.shape)] for name, each in self.parts.items()]]

    @classmethod
    def read(cls, header: list[Any], source: Iterator[Tensor]) -> _Stored:
        """Return the weight of a header; source: bytes of one part after the other."""
        kind, parts = header
        dtypes = {name: getattr(torch, dtype.removeprefix("torch.")) for name, dtype, _ in parts}
        return cls(kind, {name: next(source).view(dtypes[name]).view(shape) for name, _, shape in parts})

    def layer(self) -> nn.Module:
        """Return a linear layer with this weight."""
        if self.kind in _KINDS:
            return QuantizedLinear(_KINDS[self.kind].from_state_dict(self.parts), None)
        weight = self.parts["weight"]
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)
        return layer


def _of_all_ranks(mine: Mapping[int, _Stored], group: ModelParallelGroup, device: torch.device) -> dict[int, _Stored]:
    """Return the weights of all experts, by number: each rank sends its own in one message."""
    found: dict[int, _Stored] = {}
    headers = [[number, stored.header()] for number, stored in mine.items()]
    for rank, theirs in enumerate(zcomm.all_gather_object(headers, group.group)):
        if rank == group.rank:
            sent = [
                each.to(device).contiguous().view(-1).view(torch.uint8)
                for stored in mine.values()
                for each in stored.parts.values()
            ]
            sizes, message = [len(each) for each in sent], torch.cat(sent)
        else:
            sizes = [_nbytes(part) for _, (_, parts) in theirs for part in parts]
            message = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        zcomm.broadcast(message, group.group, source=rank, label="experts of a rank")
        source = (each.clone() for each in torch.split(message, sizes))
        found |= {number: _Stored.read(header, source) for number, header in theirs}
    return found


def _nbytes(part: Sequence[Any]) -> int:
    _, dtype, shape = part
    itemsize: int = getattr(torch, dtype.removeprefix("torch.")).itemsize
    numel: int = math.prod(shape)
    return itemsize * numel
