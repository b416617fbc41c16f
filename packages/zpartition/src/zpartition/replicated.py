"""Replicated tensors: frozen or unoptimized parameters and persistent buffers that ZeRO does not shard.

Rank 0's values are broadcast: parameters when the module is partitioned, buffers after every step.  Each rank updates
running statistics from its own data; without the broadcast, ranks and checkpoints would drift apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import final

import attrs
import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter

import zcomm
from zpartition.layout.address import Address, Shard, cut, whole
from zpartition.layout.model_parallel import addresses_of, expert_shards_of

__all__ = ["ReplicatedTensors"]


@final
@attrs.define(eq=False)
class ReplicatedTensors:
    """Tensors of a module's state that are in no bucket."""

    module: nn.Module
    group: ProcessGroup | None
    partitioned: frozenset[int]  # ids of excluded parameters; the module keeps these alive
    persistent: frozenset[str]  # names in the module's state

    @classmethod
    def of(cls, module: nn.Module, group: ProcessGroup | None, partitioned: Iterable[Parameter]) -> ReplicatedTensors:
        """Return all tensors except `partitioned`."""
        persistent = frozenset(module.state_dict(keep_vars=True))
        return cls(module, group, frozenset(map(id, partitioned)), persistent)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield parameters and persistent buffers, by name."""
        yield from ((n, param) for n, param in self.module.named_parameters() if id(param) not in self.partitioned)
        yield from self.buffers()

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield persistent buffers, by name."""
        yield from ((name, b) for name, b in self.module.named_buffers() if name in self.persistent)

    def shards(self) -> Iterator[Shard]:
        """Yield all tensors with their addresses."""
        addresses = addresses_of(self.module)
        for name, tensor in self.tensors():
            flat = whole(name, tensor).tensor
            address = addresses.get(name) or Address.whole(tensor.shape)
            yield from cut(Shard, name, address, (0, flat.numel()), flat.__getitem__)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the global tensors, by name."""
        addresses = addresses_of(self.module)
        shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors()}
        return {name: addresses[name].global_shape if name in addresses else shapes[name] for name in shapes}

    def synchronise(self) -> None:
        """Broadcast rank 0's values; of experts, those of the first rank that holds them."""
        expert_groups = expert_shards_of(self.module)
        for name, tensor in self.tensors():
            tensor.data = tensor.data.contiguous()  # a shard is flat memory
            group = zcomm.strided_group(expert_groups[name].size, self.group) if name in expert_groups else self.group
            zcomm.broadcast(tensor.data, group, source=0, label=name)

    def broadcast_buffers(self) -> None:
        """Broadcast rank 0's buffers, one message for each dtype."""
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for _, buffer in self.buffers() if zcomm.group_size(self.group) > 1 else ():
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        for dtype, buffers in by_dtype.items():
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            zcomm.broadcast(flat, self.group, source=0, label=f"{dtype} buffers")
            for buffer, part in zip(buffers, torch.split(flat, [buffer.numel() for buffer in buffers])):
                buffer.copy_(part.view(buffer.shape))
