"""What nobody partitions: frozen or unoptimized parameters that every rank keeps whole, and persistent buffers.

They follow rank 0, parameters when the module is partitioned and buffers after every step: each rank updates running
statistics from its own data, and without a rule the ranks, and what a checkpoint holds, drift apart.
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
from zpartition.cells import addresses_of, deals_of
from zpartition.shard import Address, Shard, cut, whole

__all__ = ["Bystanders"]


@final
@attrs.define(eq=False)
class Bystanders:
    """The tensors of a module's state that are in no bucket."""

    module: nn.Module
    group: ProcessGroup | None
    partitioned: frozenset[int]  # ids of parameters that are not meant; the module keeps these alive
    persistent: frozenset[str]  # names of what belongs to the module's state

    @classmethod
    def of(cls, module: nn.Module, group: ProcessGroup | None, partitioned: Iterable[Parameter]) -> Bystanders:
        """All but `partitioned`."""
        persistent = frozenset(module.state_dict(keep_vars=True))
        return cls(module, group, frozenset(map(id, partitioned)), persistent)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters and persistent buffers, by name."""
        yield from ((n, param) for n, param in self.module.named_parameters() if id(param) not in self.partitioned)
        yield from self.buffers()

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Persistent buffers, by name."""
        yield from ((name, b) for name, b in self.module.named_buffers() if name in self.persistent)

    def shards(self) -> Iterator[Shard]:
        """All of them with their addresses."""
        addresses = addresses_of(self.module)
        for name, tensor in self.tensors():
            flat = whole(name, tensor).tensor
            address = addresses.get(name) or Address.whole(tensor.shape)
            yield from cut(Shard, name, address, (0, flat.numel()), flat.__getitem__)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the global tensors, by name."""
        addresses = addresses_of(self.module)
        shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors()}
        return {name: addresses[name].global_shape if name in addresses else shapes[name] for name in shapes}

    def synchronise(self) -> None:
        """Make everything equal to rank 0's, or the first rank's that has it, where experts are dealt out."""
        deals = deals_of(self.module)
        for name, tensor in self.tensors():
            tensor.data = tensor.data.contiguous()  # a shard is flat memory
            group = zcomm.run_mates(deals[name].size, self.group) if name in deals else self.group
            zcomm.broadcast(tensor.data, group, source=0, label=name)

    def spread_buffers(self) -> None:
        """Let buffers follow rank 0, one message for each dtype."""
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for _, buffer in self.buffers() if zcomm.group_size(self.group) > 1 else ():
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        for dtype, buffers in by_dtype.items():
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            zcomm.broadcast(flat, self.group, source=0, label=f"{dtype} buffers")
            for buffer, part in zip(buffers, torch.split(flat, [buffer.numel() for buffer in buffers])):
                buffer.copy_(part.view(buffer.shape))
