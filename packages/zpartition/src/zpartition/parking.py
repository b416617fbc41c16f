"""Between phases of a run: what a partition holds, moved off the device and back, bit for bit.

While a policy is generated from, or another model is evaluated, the memory of training is needed elsewhere.  Tensors
are emptied in place, so that everybody who refers to one (the optimizer, its plans, hooks) refers to what comes back.
Until then the partition refuses to be used, and so do the module and the optimizer where they would show, load or
step what is away.

Everything is copied before anything is emptied, and everything read before anything is filled: a rank whose memory or
disk is full, or whose drive fails, makes all ranks stay as they were.

Gradients have no values between steps; their buffers are dropped, and made again when they are needed.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import attrs
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import zcomm
from zpartition.buffers import flat_zeros
from zpartition.counts import is_large
from zpartition.disk import DiskStore, Region
from zpartition.gradient import Phase
from zpartition.offload import Offload, Tier
from zpartition.shelves import OnDevice
from zpartition.storage import BucketStorage
from zpartition.tiers import open_store

if TYPE_CHECKING:
    from zpartition.partition import Partition

__all__ = ["Holding", "Parked", "Parking", "park"]


class Holding(enum.Enum):
    """What may be parked; the values are DeepSpeed's names."""

    STATES = "optim_states"  # what the optimizer keeps
    MASTERS = "hp_params"  # full-precision copies, where the weights are narrower
    WEIGHTS = "lp_params"  # whole, or this rank's shards
    GRADIENTS = "lp_grads"  # accumulators
    BUFFERS = "contiguous_grad_buffer"  # of gradients that travel, and of gathered units


class Parking:
    """The part of a `Partition` that parks it."""

    if TYPE_CHECKING:
        parked: Parked | None

    def offload_states(
        self: Any,
        include: Collection[Holding | str] = tuple(Holding),
        *,
        pin: bool = True,
        directory: str = "",
    ) -> None:
        """Move what the partition holds off the device, to the host or into files, until `reload_states`.

        include: what, as `Holding` or by DeepSpeed's names.  Every rank calls, between steps.
        Until it is back the partition raises RuntimeError where it is used.

        Raises:
            ValueError: in the middle of a step; or an unknown name.
            DiskError, MemoryError and the like, or RuntimeError for that of another rank: nothing is away then.
        """
        self.refuse_parked()
        what = frozenset(Holding(each) for each in include)
        if any(gradient.kept is not None or gradient.phase is Phase.FILLING for gradient in self.reducer.gradients):
            raise ValueError("offload_states() in the middle of a step would lose gradients: call it between steps")
        tier = Tier.DISK if directory else Tier.HOST
        self.parked = park(self, what, Offload(states=tier, directory=directory, pin=pin))

    def reload_states(self: Any) -> None:
        """Bring back what is away, bit for bit; nothing happens if there is nothing.  Every rank calls.

        Raises:
            DiskError, MemoryError and the like, or RuntimeError for that of another rank: all of it is away still.
        """
        if self.parked is not None:
            self.parked.bring_back(self)
            self.drop_parked()

    def drop_parked(self: Any) -> None:
        """Forget what is away."""
        if self.parked is not None:
            self.parked.close()
            self.parked = None

    def refuse_parked(self) -> None:
        """RuntimeError while something is away."""
        if self.parked is not None:
            raise RuntimeError("parts of this partition are parked: call reload_states(), on every rank, first")

    def refuse_without_weights(self) -> None:
        """RuntimeError while the weights are away."""
        if self.parked is not None and Holding.WEIGHTS in self.parked.what:
            _refuse_weights()


@attrs.frozen(eq=False)
class _Entry:
    """One tensor that was emptied."""

    tensor: Tensor
    shape: torch.Size
    is_shared: bool  # ranks map its memory
    host: Tensor | None  # its values, unless they are in `region`
    region: Region | None


@final
@attrs.define(eq=False)
class Parked:
    """What is away, and how it comes back."""

    what: frozenset[Holding]
    entries: list[_Entry]
    stores: list[DiskStore]  # one, if it is on disk
    views: list[tuple[Tensor, Tensor, slice, torch.Size]]  # (parameter or master, flat buffer, elements, shape)
    hooks: list[Any]  # refuse what would need it

    def bring_back(self, partition: Partition) -> None:
        """Everything is as it was.  A collective."""
        found: list[Tensor] = []
        group = partition.ranks.shard
        mapped = [
            flat_zeros(e.shape.numel(), e.tensor.dtype, partition.device, group) for e in self.entries if e.is_shared
        ]
        with _all_or_none("bring back what was parked", partition.group):
            for entry in self.entries:
                made = mapped.pop(0) if entry.is_shared else torch.empty(entry.shape, **_like(entry.tensor))
                found.append(self._filled(entry, made))
        for entry, values in zip(self.entries, found):
            entry.tensor.data = values
        for tensor, flat, elements, shape in self.views:
            tensor.data = flat[elements].view(shape)

    def _filled(self, entry: _Entry, values: Tensor) -> Tensor:
        """`values`, with what was copied away."""
        if entry.region is not None:
            buffer = self.stores[0].buffer(entry.region.num_bytes)
            self.stores[0].read(entry.region, buffer).wait()
            values.view(-1).copy_(buffer[: entry.region.num_bytes].view(values.dtype))
        elif entry.host is not None:
            values.copy_(entry.host)
        return values

    def close(self) -> None:
        """Forget the values."""
        for hook in self.hooks:
            hook.remove()
        for store in self.stores:
            store.close(remove=True)
        self.entries, self.stores, self.views, self.hooks = [], [], [], []


def park(partition: Partition, what: frozenset[Holding], offload: Offload) -> Parked:
    """Move `what` to the tier `offload.states`; what is there or slower already stays where it is.  A collective."""
    parked = Parked(what, [], [], [], [])
    _drop_buffers(partition, what)
    partition.residence.release_all()
    to_disk = offload.states is Tier.DISK
    try:
        with _all_or_none("park its states", partition.group):
            if to_disk:
                parked.stores.append(open_store(offload, partition.group))
            for tensor, is_shared in _tensors(partition, what, to_disk):
                parked.entries.append(_copied(tensor, is_shared, parked, offload))
    except BaseException:
        parked.close()
        raise
    if Holding.WEIGHTS in what:
        _unshare(partition, parked)
        _hollow(partition, parked)
    for entry in parked.entries:
        entry.tensor.data = torch.empty(0, **_like(entry.tensor))
    parked.hooks.extend(_guards(partition, what))
    return parked


@contextmanager
def _all_or_none(doing: str, group: ProcessGroup | None) -> Iterator[None]:
    """If the body fails on one rank, all of them raise.  A collective."""
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
    told = zcomm.exchange("" if problem is None else f"{type(problem).__name__}: {problem}", group)
    if problem is not None:
        raise problem
    if any(told):
        rank = next(index for index, text in enumerate(told) if text)
        raise RuntimeError(f"rank {rank} could not {doing}, so no rank has: all is as it was. {told[rank]}")


def _copied(tensor: Tensor, is_shared: bool, parked: Parked, offload: Offload) -> _Entry:
    """Copy the values away."""
    host, region = None, None
    if parked.stores:
        store = parked.stores[0]
        region = store.allocate(f"parked {len(parked.entries)}", tensor.nbytes)
        store.write(region, tensor.detach().cpu().contiguous()).wait()
    else:
        pin = offload.pin and tensor.is_cuda
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin)
        host.copy_(tensor.detach())
    return _Entry(tensor, tensor.shape, is_shared, host, region)


def _like(tensor: Tensor) -> dict[str, Any]:
    return {"dtype": tensor.dtype, "device": tensor.device}


def _guards(partition: Partition, what: frozenset[Holding]) -> Iterator[Any]:
    """Hooks that refuse to compute with, show, load or step what is away."""
    for module in partition.module.modules():
        if Holding.WEIGHTS in what:
            yield module.register_forward_pre_hook(_refuse_weights, prepend=True)
            yield module.register_state_dict_pre_hook(_refuse_weights)  # type: ignore[no-untyped-call]
        yield module.register_load_state_dict_pre_hook(_refuse_any)  # type: ignore[no-untyped-call]
    if partition.optimizer is None:
        return
    if what & {Holding.STATES, Holding.MASTERS, Holding.WEIGHTS}:
        yield partition.optimizer.register_step_pre_hook(_refuse_any)
    if Holding.STATES in what:
        yield partition.optimizer.register_state_dict_pre_hook(_refuse_any)
        yield partition.optimizer.register_load_state_dict_pre_hook(_refuse_any)


def _tensors(partition: Partition, what: Collection[Holding], to_disk: bool) -> Iterator[tuple[Tensor, bool]]:
    """What is to be emptied, each once, and whether ranks map its memory."""
    tiers = {id(storage.master): storage.home.tier for storage in partition.storages}
    movable = {Tier.DEVICE, Tier.HOST} if to_disk else {Tier.DEVICE}
    if Holding.STATES in what and partition.optimizer is not None:
        for master, entry in partition.optimizer.state.items():
            if tiers.get(id(master), Tier.DEVICE) in movable:
                yield from ((value, False) for key, value in entry.items() if is_large(key, value))
    if Holding.MASTERS in what:
        for storage in partition.storages:
            if storage.home.tier in movable and not storage.shares_master:
                yield storage.master, False
    if Holding.WEIGHTS in what:
        for storage in partition.whole:
            yield storage.flat, storage.flat.is_cpu
        for unit in partition.residence.units.values():
            for each in unit.storages:
                if isinstance(each.shelf, OnDevice):
                    yield each.shelf.span, each.shelf.span.is_cpu


def _hollow(partition: Partition, parked: Parked) -> None:
    """Let parameters whose memory is emptied read as NaN, and remember where they belong."""
    for storage in partition.whole:
        poison = torch.full((), torch.nan, dtype=storage.flat.dtype, device=storage.flat.device)
        for slot, param in zip(storage.bucket.slots, storage.params):
            parked.views.append((param, storage.flat, slice(slot.offset, slot.end), torch.Size(slot.shape)))
            param.data = poison.expand(slot.shape)


def _unshare(partition: Partition, parked: Parked) -> None:
    """Masters that are part of the weights' memory would keep it alive."""
    for storage in (*partition.storages, *partition.frozen):
        if not storage.shares_master:
            continue
        whole = isinstance(storage, BucketStorage)
        base = storage.flat if isinstance(storage, BucketStorage) else storage.own_span
        elements = slice(*storage.span) if whole else slice(0, base.numel())
        parked.views.append((storage.master, base, elements, storage.master.shape))
        poison = torch.full((), torch.nan, dtype=base.dtype, device=base.device)
        storage.master.data = poison.expand(storage.master.shape)


def _drop_buffers(partition: Partition, what: Collection[Holding]) -> None:
    for gradient in partition.reducer.gradients if Holding.GRADIENTS in what else ():
        gradient.store = None
        gradient.forget_views()
    if Holding.BUFFERS in what:
        partition.reducer.pool.clear()
        partition.residence.pool.clear()


def _refuse_weights(*_: object) -> None:
    raise RuntimeError(
        "the weights of this module are parked by offload_states(): call reload_states(), on every rank, first"
    )


def _refuse_any(*_: object) -> None:
    raise RuntimeError(
        "parts of what this would read or write are parked by offload_states(): call reload_states(), on every rank, "
        "first"
    )
