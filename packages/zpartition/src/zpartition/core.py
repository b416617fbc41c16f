"""State of a partition: the fields that `Partition` (partition.py) changes and the modules around it read.

`PartitionState` holds the fields and derives values from them; the verbs of a training step belong to `Partition`.
Modules that work on a partition (`gathered`, unfreeze.py, offload/, estimate/memory.py) take a `PartitionState`, so
that none of them imports the class that calls them.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import attrs
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter

import zcomm
from zpartition._compat import parameters_of, tables_of
from zpartition.gradients.bucket import NonFiniteProbe
from zpartition.gradients.launch_order import LaunchClock
from zpartition.gradients.reducer import GradientReducer
from zpartition.gradients.speculate import NO_SPECULATION, SpeculativeStep
from zpartition.layout.layout import Bucket, Layout
from zpartition.layout.model_parallel import ALONE, ModelParallelGroup
from zpartition.layout.policy import ZeroPolicy
from zpartition.layout.ranks import Ranks
from zpartition.layout.units import persistent_names
from zpartition.state.optimizer_state import Holder
from zpartition.weights.hooks import UnshardHooks
from zpartition.weights.sharded import ShardedStorage, Storage
from zpartition.weights.storage import BucketStorage, ReplicatedTensors
from zpartition.weights.unshard import Unsharder

__all__ = ["PartitionState", "Unused", "UnusedParametersError", "Updates", "make_reducer"]


class UnusedParametersError(ValueError, AssertionError):
    """No rank used some parameters, and the policy forbids that; an AssertionError for code that DeepSpeed raises."""


@attrs.frozen
class Unused:
    """Names of parameters without a gradient; equal on all ranks."""

    by_all: frozenset[str] = frozenset()  # no rank has a gradient
    by_some: frozenset[str] = frozenset()  # at least one rank has none


def make_reducer(
    module: nn.Module, layout: Layout, params: dict[str, Parameter], unsharder: Unsharder, device: torch.device
) -> GradientReducer:
    """Return a reducer of the gradients of `params`, whose messages have an order with the gathers of `unsharder`."""
    policy, ranks = unsharder.policy, unsharder.ranks
    gradient_ranks = ranks.duplicate() if unsharder.units else ranks  # see [Note: two orders] in unshard.py
    clock = LaunchClock.of(module, ranks, has_units=bool(unsharder.units))
    reducer = GradientReducer.create(layout, policy, params, gradient_ranks, device, clock)
    reducer.on_complete = unsharder.arrived
    unsharder.clock, unsharder.pass_over = clock, reducer.pass_over
    return reducer


class Updates:
    """The identity: a step updates every element.  Selective updates (selective/) are a subclass."""

    def apply(self, update_all: Callable[[], None]) -> None:
        """Update the masters and publish them; `update_all` does that for all elements."""
        update_all()

    def divide_by(self, scaled: Any) -> None:
        """Use `scaled.grad_scale`, (), as the divisor of gradients; None divides by 1."""

    def finish(self) -> None:
        """Show updates in the module that it does not show yet; all ranks call."""

    def settle(self) -> None:
        """Make masters and states on the host complete."""

    def published(self) -> None:
        """Notify that all masters were published, and not gathered yet."""

    def ledger(self) -> dict[str, int]:
        """Return the bytes on this rank by owner."""
        return {}

    def close(self) -> None:
        """Write everything into masters and states, and end the thread."""


AreInPlace = Callable[[], bool]  # returns True only if tensors are where they were, in the same layout
WatchTensors = Callable[[list[Any]], AreInPlace]  # takes less time than asking each; see zoptim.watch_tensors
Watch = tuple[Sequence[Storage], AreInPlace]  # the function is about the parameters of the storages


def nothing_to_do() -> None:
    """Do nothing."""


def may_have_moved() -> bool:
    """Answer for what is not watched."""
    return False


def watch_nothing(found: list[Any]) -> AreInPlace:
    """Watch nothing."""
    return may_have_moved


UNWATCHED: Watch = (), may_have_moved


@final
@attrs.frozen(eq=False)
class OutsideParameters:
    """Parameters of a module that no gradient bucket holds.

    A walk through the modules takes longer than everything else at the end of a step, so they are found anew only if
    a module or a parameter was added, replaced or removed since.
    """

    reducer: GradientReducer | None  # of the buckets
    params: Sequence[Parameter]
    tables: Sequence[dict[str, Any]]  # parameters and children of all submodules
    found: Sequence[Any]  # what was in them
    are_same: AreInPlace = may_have_moved  # returns True only if the tables have not changed

    @classmethod
    def of(cls, module: nn.Module, reducer: GradientReducer, watch: WatchTensors) -> OutsideParameters:
        """Find the parameters of `module`."""
        inside = {id(param) for gradient in reducer.gradients for param in gradient.params}
        tables = tables_of(module)
        outside = [param for param in parameters_of(module) if id(param) not in inside]
        return cls(reducer, outside, tables, _values(tables), watch([*tables]))

    def is_current(self) -> bool:
        """Return whether the modules have the same parameters and children."""
        if self.are_same():
            return True
        now = _values(self.tables)
        return len(now) == len(self.found) and all(map(operator.is_, now, self.found))


NOTHING_OUTSIDE = OutsideParameters(None, (), (), ())  # not searched yet


def _values(tables: Sequence[dict[str, Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable([table.values() for table in tables]))


@attrs.define(eq=False)
class PartitionState:
    """Flat buffers, gradients and hooks of one module on this rank.

    Invariant: until `Partition.close`, every partitioned parameter is a view into `storages` (or hollow, at stage 3).
    """

    module: nn.Module
    layout: Layout
    policy: ZeroPolicy
    ranks: Ranks
    params: dict[str, Parameter]  # partitioned parameters by name, in registration order
    storages: tuple[Storage, ...]  # by bucket index
    reducer: GradientReducer
    replicated: ReplicatedTensors
    unsharder: Unsharder  # of the units; empty below stage 3
    unshard_hooks: UnshardHooks
    frozen: tuple[ShardedStorage, ...] = ()  # parameters of units that are not trained
    optimizer: torch.optim.Optimizer | None = None  # the rebound optimizer
    holders: tuple[Holder, ...] = ()  # tensors that the rebound optimizer updates
    updates_parameters: bool = False  # the holders are the module's own parameters, not flat spans
    frozen_params: dict[str, Parameter] = attrs.field(factory=dict)  # by name
    frozen_groups: dict[str, int] = attrs.field(factory=dict)  # index of each one's parameter group, by name
    unused: frozenset[str] = frozenset()  # parameters that no rank used in the last update
    speculative_step: SpeculativeStep = NO_SPECULATION  # steps buckets on the host before `Partition.apply` is called
    updates: Updates = attrs.field(factory=Updates)  # the elements that a step updates
    mp_group: ModelParallelGroup = ALONE  # ranks that hold the other parts of split tensors
    pipeline_stages: ModelParallelGroup = ALONE  # ranks that hold the other stages of a pipeline
    watch_tensors: WatchTensors = watch_nothing  # see `Watch`
    weights_replaced: Callable[[], None] = nothing_to_do  # called by all ranks after other weights were loaded
    held_beside: Callable[[], Mapping[str, int]] = dict  # bytes by owner of what is made for this partition
    watch: Watch = UNWATCHED
    outside: OutsideParameters = NOTHING_OUTSIDE

    @property
    def whole(self) -> list[BucketStorage]:
        """Storages whose weights every rank holds in full."""
        return [storage for storage in self.storages if isinstance(storage, BucketStorage)]

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.reducer.pool.device

    @property
    def group(self) -> ProcessGroup | None:
        """All ranks that train this module."""
        return self.ranks.world

    @property
    def rank(self) -> int:
        """Rank of this process within `group`."""
        return self.ranks.rank

    @property
    def is_alone(self) -> bool:
        """True if the world has one rank."""
        return self.layout.world_size == 1

    def owned(self) -> list[Parameter]:
        """Parameters whose memory belongs to this partition."""
        return [param for storage in (*self.storages, *self.frozen) for param in storage.params]

    def owns(self, param: Parameter) -> bool:
        """Return whether the memory of `param` belongs to this partition."""
        if id(param) in self.unshard_hooks.unit_of:
            return True
        return any(param is other for other in self.owned())

    def shard_group_of(self, param: Parameter) -> ProcessGroup | None:
        """Return the group of the ranks that shard `param`, or would if it were not whole on each of them."""
        for storage in (*self.storages, *self.frozen):
            if any(param is other for other in storage.params):
                return self.ranks.groups_for(storage.bucket).shard
        return self.ranks.shard

    def persistent(self) -> list[Parameter]:
        """Return the parameters that are too small to be sharded; [] below stage 3."""
        names = persistent_names(self.module, self.policy) if self.policy.shards_weights else frozenset[str]()
        return [param for name, param in self.module.named_parameters() if name in names]

    def has_values(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is in the memory of trained weights that are whole: gathered, or not sharded."""
        if self.unshard_hooks.is_gathered_memory(tensor):
            return True
        address = tensor.untyped_storage().data_ptr()
        return any(param.untyped_storage().data_ptr() == address for each in self.whole for param in each.params)

    def method(self, bound: Callable[..., Any]) -> Callable[..., Any]:
        """Return `bound`, a method of the module, in a form that may read sharded weights, as `forward` may.

        All ranks call the result.
        """
        return self.unshard_hooks.of_method(bound) if self.unshard_hooks.handles else bound

    def check_resident(self) -> None:
        """Raise RuntimeError while any state is offloaded (`offload_states`)."""
        self.unsharder.check_resident()

    def check_weights_resident(self) -> None:
        """Raise RuntimeError while the weights are offloaded (`offload_states`)."""
        self.unsharder.check_weights_resident()

    # -- gradients -------------------------------------------------------------------------------

    def parameters_outside(self) -> Sequence[Parameter]:
        """Parameters of the module whose gradients no bucket takes: frozen and unoptimized ones."""
        if self.outside.reducer is not self.reducer or not self.outside.is_current():
            watch = watch_nothing if self.unsharder.units else self.watch_tensors  # weights of units move
            self.outside = OutsideParameters.of(self.module, self.reducer, watch)
        return self.outside.params

    @property
    def non_finite_probe(self) -> NonFiniteProbe:
        """Non-finite probe: once it is on, names the first parameter of this rank whose gradient was not finite."""
        return self.reducer.non_finite_probe

    def num_unused(self) -> int:
        """Number of partitioned parameters without a gradient on this rank since `zero_grad`."""
        return sum(len(g.params) - len(g.seen) for g in self.reducer.gradients)

    def num_late(self) -> int:
        """Number of buckets of this rank with gradients that have not been sent; see `finish_gradients`."""
        return len(self.reducer.late())

    def num_arrived(self) -> int:
        """Number of gradients that the running (or the last) backward has produced on this rank."""
        return self.reducer.num_arrived

    def has_plain_gradients(self) -> bool:
        """Return whether a backward outside `micro_step` has left gradients in parameters of this rank."""
        return any(g.has_plain(i) for g in self.reducer.gradients for i in range(len(g.params)))

    def num_plain_backwards(self) -> int:
        """Number of such backwards since the step began, or since their gradients were adopted or dropped."""
        return max(self.reducer.plain.values(), default=0)

    def adopt_plain_gradients(self, divisor: int, *, is_last: bool) -> None:
        """Reduce such gradients, divided by `divisor`, as those of one more micro-step.  All ranks call.

        is_last: a step follows.

        Raises:
            HiddenGradientError: one was changed since its backward.
        """
        self.reducer.adopt_plain(divisor, is_last=is_last)

    def drop_plain_gradients(self) -> None:
        """Drop such gradients, and those of parameters that are not partitioned; gradients of micro-steps stay."""
        self.reducer.plain.clear()
        for gradient in self.reducer.gradients:
            gradient.drop_plain()
        for param in self.parameters_outside():
            param.grad = None

    def named_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (parameter name, this rank's flat part of its reduced gradient); valid after `finish_gradients`."""
        for storage, gradient in zip(self.storages, self.reducer.gradients):
            if gradient.kept is not None:
                for piece in storage.pieces(self.rank):
                    yield piece.slot.name, gradient.kept[piece.offset : piece.offset + piece.numel]

    def is_counted(self, bucket: Bucket) -> bool:
        """Return whether a sum over all ranks includes this rank's gradient of `bucket`; see `sum_over_shards`."""
        if bucket.copy:
            return False
        return self.rank // bucket.num_expert_shards < bucket.num_shards or not self.layout.is_expert_sharded

    @property
    def has_all_shards(self) -> bool:
        """Return whether this rank alone has all gradients of the model: `sum_over_shards` is the identity."""
        return self.layout.world_size == self.mp_group.size == self.pipeline_stages.size == 1

    def sum_over_shards(self, vector: torch.Tensor, *, num_of_model: int = 1) -> None:
        """All-reduce (sum) statistics whose first element is a sum over this rank's gradients.

        Where several ranks hold the same gradients, the first element of one of them counts.  The first
        `num_of_model` elements are also summed over model-parallel ranks and pipeline stages (model_parallel.py), on
        which the rest is equal.
        """
        if not self.reducer.reduces:
            vector[:1].div_(self.layout.world_size)  # each rank has a gradient of its own
        elif self.rank >= self.layout.num_shards and not self.layout.is_expert_sharded:
            vector[:1].zero_()  # `vector[0] = 0.0` would copy from the host, and wait for the device
        reduced = vector.to(self.device)  # gradients may be on the host, whose tensors a group may not take
        zcomm.all_reduce(reduced, self.group, label="gradient statistics")
        self.mp_group.all_reduce(reduced[:num_of_model])
        self.pipeline_stages.all_reduce(reduced[:num_of_model])
        if reduced is not vector:
            vector.copy_(reduced)

    def own_gradients(self) -> list[torch.Tensor]:
        """Return this rank's own gradients by bucket, whole, while gradients are not reduced, or on one rank."""
        is_alone = self.reducer.reduces and self.is_alone
        found = [each.kept if is_alone else each.unreduced_whole for each in self.reducer.gradients]
        assert all(each is not None for each in found), "call finish_gradients first"
        return [each for each in found if each is not None]

    def agree_on_unused(self) -> Unused:
        """Return the parameters for which ranks have no gradient.  A collective.

        Raises:
            UnusedParametersError: the policy forbids unused parameters and there are some.
            ValueError: no rank has any gradient; a stage of a pipeline may have none (all its layers are skipped).
        """
        slots = [slot.name for _, slot in self.layout.slots()]
        flags = [i in gradient.seen for gradient in self.reducer.gradients for i in range(len(gradient.params))]
        used = torch.tensor(flags, dtype=torch.int32, device=self.device)
        zcomm.all_reduce(used, self.group, label="used parameters")
        counts = dict(zip(slots, used.tolist()))
        names = frozenset(name for name, count in counts.items() if not count)
        if slots and len(names) == len(slots) and self.pipeline_stages.size == 1:
            raise ValueError(
                "no rank produced a gradient for any parameter: the loss comes from another module, or is constant"
            )
        if names and not self.policy.ignore_unused:
            raise UnusedParametersError(
                f"no rank produced a gradient for {', '.join(sorted(names)[:10])} ({len(names)} in all). Use them in "
                "the forward pass, freeze them, or set ignore_unused_parameters to true."
            )
        return Unused(names, frozenset(name for name, count in counts.items() if count < self.layout.world_size))
