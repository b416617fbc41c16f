"""Access to one parameter's weight, gradient and optimizer state: full, or this rank's part, to read and to set.

    weight = zpartition.safe_get_full_fp32_param(model.embed.weight)
    moment = zpartition.safe_get_full_optimizer_state(model.embed.weight, "exp_avg")
    zpartition.safe_set_full_fp32_param(model.embed.weight, weight.clamp(-1, 1))

The names are DeepSpeed's.  The `full` getters are collectives if anything is sharded: every rank must call.  Setters
expect the same value on every rank (`local` ones on all ranks that hold the same part, if shard groups are smaller
than the world) and send nothing.  The module shows a weight that was set after the next step, or after
`partition.publish()`, which every rank must call.  Gradients are available between a backward and the step, or inside
a step's hooks; they still include the loss scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor
from torch.nn import Parameter

import zcomm
from zpartition.core import PartitionState
from zpartition.layout.layout import Bucket, Piece
from zpartition.layout.policy import Tier
from zpartition.ownership import acquirer_of, owner_of
from zpartition.state.counts import begin
from zpartition.state.optimizer_state import StatePlacement, elements, is_coded
from zpartition.weights.sharded import ShardedStorage

__all__ = [
    "local_weight",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
]


@attrs.frozen(eq=False)
class _ParamAccess:
    """One parameter of a partition, and this rank's parts of it."""

    partition: PartitionState
    param: Parameter
    index: int  # of the bucket
    pieces: Sequence[Piece]  # empty if other ranks hold all of it

    @classmethod
    def of(cls, param: Parameter) -> _ParamAccess:
        """Find the partition of `param`.  Raises ValueError if it is not partitioned, or not trained."""
        owner = owner_of(param)
        if owner is None:
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} belongs to no partition: it is frozen, it was not passed "
                "to shard() or initialize(), or its partition was closed."
            )
        owner.check_resident()
        owner.speculative_step.rollback_all()  # getters return the values before the step
        for index, storage in enumerate(owner.storages):
            for slot, other in zip(storage.bucket.slots, storage.params):
                if other is param:
                    mine = tuple(p for p in storage.pieces(owner.rank) if p.slot is slot)
                    return cls(owner, param, index, mine)
        raise ValueError(f"a parameter of shape {tuple(param.shape)} is frozen: it has no master, gradient or state.")

    @property
    def is_sharded(self) -> bool:
        return self.bucket.num_shards > 1

    @property
    def bucket(self) -> Bucket:
        return self.partition.layout.buckets[self.index]

    def local(self, source: Tensor) -> Tensor:
        """Return this rank's elements of the parameter in `source`, a bucket's shard; a view, perhaps empty."""
        if not self.pieces:
            return source.view(-1)[:0]
        (piece,) = self.pieces
        return source.view(-1)[piece.offset : piece.offset + piece.numel]

    def whole(self, local: Tensor) -> Tensor:
        """Gather the full parameter from every rank's `local`.  A collective."""
        if not self.is_sharded:
            return local.to(self.partition.device, copy=True).view(self.param.shape)
        flat = torch.zeros(self.param.numel(), dtype=local.dtype, device=self.partition.device)
        if self.pieces:
            flat[slice(*self.pieces[0].span)] = local
        bits = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
        wide = bits if bits.element_size() >= 4 else bits.int()  # others are zero, so a sum moves bits
        zcomm.all_reduce(wide, self.partition.ranks.groups_for(self.bucket).shard, label="one parameter")
        return wide.to(bits.dtype).view(flat.dtype).view(self.param.shape)

    def part_of(self, value: Tensor) -> Tensor:
        """Return this rank's elements of a full `value`.  Raises ValueError for another shape."""
        if value.shape != self.param.shape:
            raise ValueError(f"the value has shape {tuple(value.shape)}, the parameter {tuple(self.param.shape)}.")
        return value.reshape(-1)[slice(*self.pieces[0].span)] if self.pieces else value.reshape(-1)[:0]

    # -- master, gradient, state -----------------------------------------------------------------

    def master(self) -> Tensor:
        storage = self.partition.storages[self.index]
        return storage.placement.values(storage.master)

    def write_master(self, part: Tensor) -> None:
        """Set this rank's elements of the master."""
        storage = self.partition.storages[self.index]
        for piece in self.pieces:
            storage.placement.write(storage.master, piece.offset, part.reshape(-1))

    def gradient(self) -> Tensor | None:
        return self.partition.reducer.gradients[self.index].kept

    def unreduced_mean(self) -> Tensor | None:
        """Return the full mean over ranks of gradients that are not reduced yet; None if no rank has any.

        A collective while there is no reduced gradient, or after backwards in `no_sync`.
        """
        reducer, ranks = self.partition.reducer, self.partition.ranks
        gradient = reducer.gradients[self.index]
        if gradient.kept is not None and reducer.num_unsent == 0:
            return None
        own = gradient.unreduced(next(i for i, other in enumerate(gradient.params) if other is self.param))
        wide = torch.promote_types(self.param.dtype, torch.float32)
        total = torch.zeros(self.param.numel() + 1, dtype=wide, device=self.partition.device)  # and number of ranks
        if own is not None:
            total[:-1].copy_(own.reshape(-1))
            total[-1] = 1.0
        zcomm.all_reduce(total, ranks.groups_for(self.bucket).world, label="one gradient")
        factors = reducer.factors[self.index]
        return total[:-1].view(self.param.shape) * (factors.before * factors.after) if total[-1] else None

    def write_gradient(self, part: Tensor) -> None:
        """Set this rank's elements, also where the optimizer reads them.  Raises ValueError without a gradient."""
        kept = self.gradient()
        if kept is None:
            raise ValueError(
                "there is no reduced gradient: it exists from the last backward of a step until the step."
            )
        self.local(kept).copy_(part)
        read = self.partition.storages[self.index].master.grad
        if read is not None and read.data_ptr() != kept.data_ptr():
            self.local(read).copy_(part)

    def read_state(self, key: str) -> Tensor:
        """Return this rank's elements of one optimizer state, decoded if it is quantized."""
        optimizer, holder = self._optimizer()
        state = self._state_placement.state(optimizer, holder)
        if key not in state:
            raise ValueError(
                f"the optimizer has no state {key!r} of this parameter; it has {', '.join(state) or 'none yet'}."
            )
        if getattr(state[key], "shape", None) != holder.shape:
            raise ValueError(
                f"state {key!r} of {type(optimizer).__name__} has no value for each element (but sums over rows, or "
                "a count). state_shards(optimizer, partition.holders) yields every state."
            )
        if self.partition.updates_parameters:
            return elements(state[key], 0, self.param.numel())
        return self.local(elements(state[key], 0, holder.numel()))

    def write_state(self, key: str, part: Tensor) -> None:
        """Set this rank's elements of one optimizer state."""
        optimizer, holder = self._optimizer()
        state = dict(self._state_placement.state(optimizer, holder))
        self.read_state(key)  # raises for an unknown key
        value = state[key]
        mine = self.partition.storages[self.index].pieces(self.partition.rank)
        for piece in self.pieces:
            begin(state, mine.index(piece))
        flat = elements(value, 0, holder.numel())
        (flat if self.partition.updates_parameters else self.local(flat)).copy_(part)
        if is_coded(value):
            self._state_placement.set_state(optimizer, holder, {**state, key: flat.view(holder.shape)})

    @property
    def _state_placement(self) -> StatePlacement:
        """Placement of the optimizer's state."""
        return self.partition.storages[self.index].placement

    def _optimizer(self) -> tuple[torch.optim.Optimizer, Parameter]:
        if self.partition.optimizer is None:
            raise ValueError("this partition has no optimizer, so there is no optimizer state.")
        held = self.param if self.partition.updates_parameters else self.partition.storages[self.index].master
        return self.partition.optimizer, held


def safe_get_full_fp32_param(param: Parameter) -> Tensor:
    """Return the full weight as the optimizer sees it, in the master's dtype and in new memory.  A collective.

    >>> import torch, zpartition
    >>> model = torch.nn.Linear(4, 2)
    >>> partition = zpartition.shard(model, policy=zpartition.ZeroPolicy(stage=3))
    >>> zpartition.safe_get_full_fp32_param(model.weight).shape
    torch.Size([2, 4])
    """
    place = _ParamAccess.of(param)
    return place.whole(place.local(place.master()))


def safe_get_full_grad(param: Parameter) -> Tensor | None:
    """Return the full mean gradient of the step's backwards so far; None before the first.  A collective.

    Gradients that are not reduced yet (inside and after `no_sync`, after a plain `loss.backward()`) are summed over
    ranks for the result, in float32 or wider, and stay unreduced.

    >>> import torch, zpartition
    >>> model = torch.nn.Linear(4, 2)
    >>> partition = zpartition.shard(model, policy=zpartition.ZeroPolicy(stage=2))
    >>> with partition.micro_step(is_last=True):
    ...     model(torch.ones(1, 4)).sum().backward()
    >>> zpartition.safe_get_full_grad(model.bias)
    tensor([1., 1.])
    """
    place = _ParamAccess.of(param)
    kept, unreduced = place.gradient(), place.unreduced_mean()
    if kept is None:
        return unreduced
    whole = place.whole(place.local(kept))
    return whole if unreduced is None else whole + unreduced


def safe_get_full_optimizer_state(param: Parameter, key: str) -> Tensor:
    """Return one full optimizer state, shaped like the parameter.  A collective.  Raises ValueError for a bad key."""
    place = _ParamAccess.of(param)
    return place.whole(place.read_state(key))


def safe_get_local_fp32_param(param: Parameter) -> Tensor:
    """Return this rank's elements of the weight, flat: a view of the master, or a copy of one on disk."""
    place = _ParamAccess.of(param)
    on_disk = place.partition.storages[place.index].placement.tier is Tier.DISK
    return place.local(place.master()).clone() if on_disk else place.local(place.master())


def local_weight(param: Parameter) -> Tensor:
    """Return this rank's elements of the weight in the module's dtype, flat; also of frozen parameters.

    A view of the shard, or a copy of an offloaded one.  Raises ValueError for a parameter that is not partitioned.
    """
    owner = acquirer_of(param)
    if owner is None:
        raise ValueError(f"a parameter of shape {tuple(param.shape)} belongs to no partition.")
    owner.check_resident()
    owner.speculative_step.rollback_all()
    unit = owner.unshard_hooks.unit_of.get(id(param))
    storages = (*owner.storages, *owner.frozen) if unit is None else unit.storages
    storage, place = next((s, i) for s in storages for i, other in enumerate(s.params) if other is param)
    slot = storage.bucket.slots[place]
    pieces = [piece for piece in storage.pieces(owner.rank) if piece.slot is slot]
    own = storage.own_span
    part = own[pieces[0].offset : pieces[0].offset + pieces[0].numel] if pieces else own[:0]
    if isinstance(storage, ShardedStorage) and storage.param_placement.tier is not Tier.DEVICE:
        storage.param_placement.unload()
        return part.clone()
    return part.detach()


def safe_get_local_grad(param: Parameter) -> Tensor | None:
    """Return this rank's elements of the reduced gradient, flat; None without one."""
    place = _ParamAccess.of(param)
    kept = place.gradient()
    return None if kept is None else place.local(kept)


def safe_get_local_optimizer_state(param: Parameter, key: str) -> Tensor:
    """Return this rank's elements of one optimizer state, flat."""
    return _ParamAccess.of(param).read_state(key)


def safe_set_full_fp32_param(param: Parameter, value: Tensor) -> None:
    """Set the weight from a full `value`, equal on all ranks.

    >>> import torch, zpartition
    >>> model = torch.nn.Linear(4, 2)
    >>> partition = zpartition.shard(model, policy=zpartition.ZeroPolicy(stage=3))
    >>> zpartition.safe_set_full_fp32_param(model.bias, torch.tensor([1.0, 2.0]))
    >>> zpartition.safe_get_full_fp32_param(model.bias)
    tensor([1., 2.])
    """
    place = _ParamAccess.of(param)
    place.write_master(place.part_of(value))


def safe_set_full_grad(param: Parameter, value: Tensor) -> None:
    """Set the reduced gradient from a full `value` of the parameter's shape, equal on all ranks.

    Raises ValueError without a gradient.
    """
    place = _ParamAccess.of(param)
    place.write_gradient(place.part_of(value))


def safe_set_full_optimizer_state(param: Parameter, value: Tensor, key: str) -> None:
    """Set one optimizer state from a full `value` of the parameter's shape, equal on all ranks."""
    place = _ParamAccess.of(param)
    place.write_state(key, place.part_of(value))


def safe_set_local_fp32_param(param: Parameter, value: Tensor) -> None:
    """Set this rank's elements of the weight."""
    place = _ParamAccess.of(param)
    place.write_master(value)


def safe_set_local_grad(param: Parameter, value: Tensor) -> None:
    """Set this rank's elements of the reduced gradient."""
    _ParamAccess.of(param).write_gradient(value)


def safe_set_local_optimizer_state(param: Parameter, value: Tensor, key: str) -> None:
    """Set this rank's elements of one optimizer state."""
    _ParamAccess.of(param).write_state(key, value)
