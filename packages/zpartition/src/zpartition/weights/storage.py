"""Weights that every rank holds in full: flat buckets, and replicated tensors outside of any bucket.

Buckets.  The module's parameters become views of one buffer per bucket.  The optimizer updates this rank's span; an
in-place all-gather of the spans updates every view, with no copy per parameter.  In full precision the optimizer
updates the span itself; in half precision it updates an fp32 master of the span, which is cast into the buffer
afterwards.

Replicated tensors are frozen or unoptimized parameters and persistent buffers, which ZeRO does not shard.  Rank 0's
values are broadcast: parameters when the module is partitioned, buffers after every step.  Each rank updates running
statistics from its own data; without the broadcast, ranks and checkpoints would drift apart.
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
from zpartition.layout.layout import Bucket, Piece
from zpartition.layout.model_parallel import addresses_of, expert_shards_of
from zpartition.layout.policy import ZeroPolicy
from zpartition.memory.buffers import BufferPool
from zpartition.memory.placement import ON_DEVICE, MasterPlacement, refresh_changed, same_bits

__all__ = ["BucketStorage", "ReplicatedTensors", "piece_numel"]


@final
@attrs.define(eq=False)
class BucketStorage:
    """Weights of one bucket on one rank.

    Invariant: between `publish` and the next optimizer step, `flat[span] == master.to(flat.dtype)`, or `rounded`.
    """

    bucket: Bucket
    params: tuple[Parameter, ...]  # in slot order; their `.data` are views of `flat`
    span: tuple[int, int]  # of this rank
    flat: torch.Tensor  # (bucket.numel,) parameter dtype, all ranks' spans
    master: Parameter  # (span numel,) master dtype: a view of `flat`, or memory of its own
    placement: MasterPlacement = ON_DEVICE  # of master and states
    rounded: torch.Tensor | None = None  # `own_span` after rounding, until `publish`; None: it is not rounded
    _slots_at: tuple[int, list[int]] = (0, [])  # an address of `flat`, and those of the slots then

    @classmethod
    def create(
        cls, bucket: Bucket, params: tuple[Parameter, ...], policy: ZeroPolicy, rank: int, flat: torch.Tensor
    ) -> BucketStorage:
        """Move `params` into `flat`, (bucket.numel,) zeros; their values, shapes and identities stay."""
        for slot, param in zip(bucket.slots, params):
            view = flat[slot.offset : slot.end].view(slot.shape)
            view.copy_(param.data)
            param.data = view
        lo, hi = bucket.span(rank)
        master = Parameter(flat[lo:hi].to(policy.master_for(bucket.dtype)))
        return cls(bucket, params, (lo, hi), flat, master)

    @property
    def own_span(self) -> torch.Tensor:
        """This rank's part of `flat`."""
        return self.flat[self.span[0] : self.span[1]]

    @property
    def _span_address(self) -> int:
        return self.flat.data_ptr() + self.span[0] * self.flat.element_size()

    @property
    def shares_master(self) -> bool:
        """True if the optimizer updates the module's own memory."""
        return self.master.data_ptr() == self.own_span.data_ptr()

    def refresh_master(self) -> None:
        """Copy the module's weights into the master (after a broadcast or an edit)."""
        self.placement.refresh(self.master, self.own_span)

    def adopt_edits(self) -> None:
        """Copy edited weights into the master; unchanged elements keep the precision of the master."""
        if not self.shares_master:
            values = self.placement.values(self.master) if self.rounded is None else self.rounded
            shown = values.to(self.flat.dtype).to(self.flat.device)
            refresh_changed(self.placement, self.master, self.own_span, same_bits(self.own_span, shown))

    def publish(self) -> None:
        """Cast the master into this rank's span of the module's weights."""
        self.rounded = None
        if self.placement is ON_DEVICE and self.master.data_ptr() == self._span_address:
            return
        self.placement.publish(self.master, self.own_span)

    def gather(self, group: ProcessGroup | None, most_numel: int, pool: BufferPool) -> zcomm.Handle:
        """Start to collect the spans of all ranks in `flat`.

        most_numel: elements of one message, at least one of each rank; 0: one message, in place.  Longer buckets are
        gathered in pieces, one after the other, through a free buffer of `pool` or memory of one message.
        """
        label, shards = f"weights[{self.bucket.index}]", self.bucket.num_shards
        step = piece_numel(self.bucket, most_numel)
        if step >= self.bucket.span_numel:
            return zcomm.all_gather(self.flat, self.own_span, group, async_op=True, label=label)
        lent = pool.reuse(shards * step, self.flat.dtype)
        buffer = torch.empty(shards * step, dtype=self.flat.dtype, device=self.flat.device) if lent is None else lent
        for first in range(0, self.bucket.span_numel, step):
            part = self.own_span[first : first + step]
            whole = buffer[: shards * part.numel()]
            zcomm.all_gather(whole, part, group, label=label)
            self.flat.view(shards, -1)[:, first : first + part.numel()].copy_(whole.view(shards, -1))
        if lent is not None:
            pool.release(lent)
        return zcomm.DONE

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """Return the parameters' parts inside `master`."""
        return tuple(self.bucket.pieces(rank))

    def moved(self) -> str:
        """Return the name of the first parameter that no longer is a contiguous view of its slot; "" if all are."""
        expected = self._slot_addresses()
        found = [*map(torch.Tensor.data_ptr, self.params)]
        if found == expected and all(map(torch.Tensor.is_contiguous, self.params)):
            return ""
        triples = zip(self.bucket.slots, self.params, expected)
        return next(s.name for s, param, at in triples if param.data_ptr() != at or not param.is_contiguous())

    def _slot_addresses(self) -> list[int]:
        """Return the address of each parameter in `flat`; 0 for an empty one, as `data_ptr` does."""
        address, itemsize = self.flat.data_ptr(), self.flat.element_size()
        if self._slots_at[0] != address:
            slots = self.bucket.slots
            self._slots_at = address, [slot.numel and address + slot.offset * itemsize for slot in slots]
        return self._slots_at[1]

    @property
    def persistent_bytes(self) -> int:
        """Bytes of the weights between steps."""
        return self.flat.nbytes

    def close(self) -> None:
        """Give every parameter its own memory."""
        for param in self.params:
            param.data = param.data.clone()
            param.grad = None


def piece_numel(bucket: Bucket, most_numel: int) -> int:
    """Return the elements of each rank in one message; padding does not count against the limit, and 0 is none."""
    if not most_numel or sum(slot.numel for slot in bucket.slots) <= most_numel:
        return bucket.span_numel
    num_pieces = -(-bucket.span_numel // max(1, most_numel // bucket.num_shards))
    return -(-bucket.span_numel // num_pieces)


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
