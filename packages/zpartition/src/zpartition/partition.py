"""A module partitioned over ranks: the facade of this package.

`shard(module, optimizer, policy=...)` makes one: it moves the trainable parameters into flat buckets, hooks their
gradients, and rebinds the optimizer onto this rank's spans.  A training step is then

    with partition.micro_step(is_last=True):
        loss.backward()
    partition.finish_gradients()          # accumulators are in the optimizer's .grad
    partition.apply(optimizer.step)       # update this rank's spans, publish them to all views
    partition.zero_grad()

Parameters that no rank used in a step keep their weights and their optimizer state, step counts too, as they would in
one process where their gradient is None; the caller learns from `num_unused` (summed over ranks) whether to ask for
that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, final

import attrs
import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter

import zcomm
from zpartition import contents, shapes, state, unfreezing
from zpartition.admission import claim, disclaim, one_device
from zpartition.ahead import NEVER, Ahead, Bucket, running
from zpartition.apart import in_parts
from zpartition.bystanders import Bystanders
from zpartition.cells import ALONE, Cell, cell_of, stages_of
from zpartition.deferred import Deferred
from zpartition.filling import fill_storages
from zpartition.gradient_facts import GradientFacts
from zpartition.layout import Layout
from zpartition.ledger import count
from zpartition.offload import Speculation
from zpartition.parking import Parked, Parking
from zpartition.policy import ZeroPolicy
from zpartition.ranks import Ranks
from zpartition.reducer import GradientReducer
from zpartition.residence import Residence
from zpartition.resting import Unused, agree_on_unused, untouched
from zpartition.rollcall import RollCall
from zpartition.shard import LazyShard, Shard
from zpartition.sharded import ShardedStorage, make_storage
from zpartition.storage import BucketStorage
from zpartition.tiers import Tiers
from zpartition.watch import Watch


@final
@attrs.define(eq=False)
class Partition(GradientFacts, Parking):
    """What lives where, for one module; owns the flat buffers, the reducer and the hooks.

    Invariant: until `close`, every partitioned parameter's memory is a view into `storages` (or hollow, at stage 3).
    """

    module: nn.Module
    layout: Layout
    policy: ZeroPolicy
    ranks: Ranks
    params: dict[str, Parameter]  # partitioned ones by name, in registration order
    storages: tuple[BucketStorage | ShardedStorage, ...]  # by bucket index
    reducer: GradientReducer
    bystanders: Bystanders
    residence: Residence  # of the units; empty below stage 3
    watch: Watch
    tiers: Tiers  # where masters, states and reduced gradients live
    frozen: tuple[ShardedStorage, ...] = ()  # units' parameters that are not trained
    optimizer: torch.optim.Optimizer | None = None  # the rebound one
    holders: tuple[state.Holder, ...] = ()  # what the rebound optimizer updates
    at_rest: dict[str, Parameter] = attrs.field(factory=dict)  # parameters that were frozen
    roll: RollCall = attrs.field(factory=lambda: RollCall(None))  # what ranks have unfrozen
    dormant: dict[str, int] = attrs.field(factory=dict)  # parameter groups that held some of those
    parked: Parked | None = None  # what offload_states has moved away
    ahead: Ahead = NEVER  # updates on the host before the step is due
    updates_parameters: bool = False  # whether those are the module's own parameters, not flat spans
    speculation: tuple[Any, Callable[[], torch.Tensor | None]] | None = None  # arguments of `run_ahead`
    cell: Cell = ALONE  # where tensors are split beyond this partition
    stages: Cell = ALONE  # where the model is cut between tensors

    @classmethod
    def create(
        cls,
        module: nn.Module,
        layouts: tuple[Layout, Layout],
        policy: ZeroPolicy,
        ranks: Ranks,
        deferred: Deferred | None = None,
    ) -> Partition:
        """Build the flat buffers and hook the parameters; see `shard`.  `layouts`: of trained and of frozen ones."""
        layout, frozen = layouts
        everything = dict(module.named_parameters())
        params = {name: everything[name] for name in everything if name in layout.names}
        device = one_device(params)
        tiers = Tiers.create(layout, policy.offload, device, ranks.world)
        storages = tuple(tiers.adopt(make_storage(bucket, everything, policy, ranks)) for bucket in layout.buckets)
        resting = tuple(
            tiers.shelve(ShardedStorage.of(bucket, everything, policy, ranks, False)) for bucket in frozen.buckets
        )
        units = [s for s in (*storages, *resting) if isinstance(s, ShardedStorage)]
        if deferred is not None:
            fill_storages(deferred, [*storages, *resting], ranks.world)
        for unit in units if deferred is None else ():
            unit.take(ranks.having(unit.bucket).world)
        owned = [param for storage in (*storages, *resting) for param in storage.params]
        bystanders = Bystanders.of(module, ranks.world, owned)
        residence = Residence.of(units, policy, ranks, device)
        watch = Watch.install(module, residence)
        routes = ranks.twins() if residence.units else ranks  # see [Note: two orders] in residence.py
        reducer = GradientReducer.create(layout, policy, params, routes, device, residence.arrived)
        tiers.attach(reducer)
        partition = cls(module, layout, policy, ranks, params, storages, reducer, bystanders, residence, watch, tiers)
        partition.frozen, partition.cell, partition.stages = resting, cell_of(module), stages_of(module)
        partition.at_rest = {name: param for name, param in everything.items() if not param.requires_grad}
        partition.roll = RollCall(zcomm.host_twin(ranks.world) if partition.at_rest else None)
        partition.holders = tuple(state.Holder(s.master, s.pieces(ranks.rank), s.home) for s in storages)
        claim(partition, partition.owned(), [*reducer.hooks, watch])
        partition.synchronise()
        return partition

    def rebind(self, optimizer: torch.optim.Optimizer) -> None:
        """Let `optimizer` update this partition's shards instead of the module's parameters."""
        cuts = self.layout.num_shards > 1 or not all(s.shares_master for s in self.storages)
        state.refuse_unfit(optimizer, cuts=cuts)
        num_groups = len(optimizer.param_groups)
        self.dormant = unfreezing.dormant_groups(self, optimizer)
        lays_out = cuts and shapes.takes_cuts(optimizer)
        if not lays_out and not state.is_elementwise(optimizer):
            self.holders = tuple(state.Holder.of_parameter(n, p) for n, p in self.params.items())
            self.updates_parameters = True
        else:
            masters = [holder.tensor for holder in self.holders]
            if lays_out:
                self.tiers.step_all_at_once()
            tell = functools.partial(shapes.lay_out, optimizer, masters, self.layout, self.ranks.shard, self.device)
            held: list[list[state.Holder]] = [[] for _ in range(num_groups)]
            for storage, holder in zip(self.storages, self.holders):
                held[storage.bucket.group].append(holder)
            state.rebind(optimizer, held, self.params, tell if lays_out else lambda: None)
        self.optimizer = optimizer
        self.tiers.hook(optimizer, self.storages)
        self.run_ahead(optimizer, lambda: getattr(optimizer, "grad_scale", None))

    def run_ahead(self, scaled: Any, assume: Callable[[], torch.Tensor | None]) -> None:
        """Where the policy speculates: how to update ahead of `apply`, and the divisor that is expected then.

        scaled: the optimizer, or what divides for it: `step()` reads its attribute `grad_scale`, as `apply` will find
            it.  assume: asked when the last backward of a step begins; None divides nothing.
        """
        if self.policy.offload.speculation is Speculation.OFF or self.updates_parameters or self.optimizer is None:
            return
        self.ahead.close()
        self.speculation = scaled, assume
        buckets = [Bucket(*pair) for pair in zip(self.holders, self.reducer.gradients)]
        self.ahead = running(buckets, self.optimizer, scaled, assume, self.tiers.mover)

    def synchronise(self) -> None:
        """Make weights, frozen parameters and buffers equal to rank 0's; those of units are already."""
        self.refuse_parked()
        for storage in self.whole:
            holders = self.ranks.having(storage.bucket).world
            zcomm.broadcast(storage.flat, holders, source=0, label=f"weights[{storage.bucket.index}]")
            storage.refresh_master()
        self.bystanders.synchronise()

    def refine(self, values: Mapping[str, torch.Tensor]) -> None:
        """Give masters `values` (by parameter) where these are of a wider dtype than the module's weights.

        For whoever has loaded the module and called `synchronise`: in 16 bits masters have the rounded values then.
        All ranks call, with the same shapes; rank 0's values count.
        """
        contents.refine(self, values)

    def admit_unfrozen(self) -> tuple[str, ...]:
        """Train from now on what was frozen when the module was partitioned and requires a gradient now; its names.

        To be called between two steps, on all ranks, where there are frozen parameters.  What goes on depends on it
        in nothing: weights and states of the others stay where they are.  See unfreezing.py.

        Raises:
            ValueError: in the middle of a step; ranks have unfrozen different parameters; or the optimizer has no
                parameter group for one.
        """
        return unfreezing.admit(self)

    # -- a step ----------------------------------------------------------------------------------

    @contextmanager
    def micro_step(self, *, is_last: bool = True, is_local: bool = False, is_scaled: bool = False) -> Iterator[None]:
        """Around one backward; `is_last` says that a step follows.

        is_local: nothing is sent; gradients add up on this rank, whole and in the parameters' dtype at any stage,
            until a later backward or `finish_gradients` sends their sum.  On all ranks alike.
        is_scaled: the loss carries a factor that the step divides out (a loss scale, say), so `.grad` of parameters
            will not show their gradients; see grad_placeholder.py.
        """
        self.refuse_parked()
        self.watch.sweep()
        self.roll.hear()
        if is_last and not is_local:
            self.ahead.begin()
        try:
            with (
                self.residence.backward(),
                self.reducer.round(is_last=is_last, is_local=is_local, is_scaled=is_scaled),
            ):
                yield
        except BaseException:
            self.watch.reset()
            self.residence.reset()
            raise

    def finish_gradients(self) -> list[torch.Tensor]:
        """The mean gradients that this rank keeps, one flat tensor per bucket, also set as `.grad` of the masters.

        Of what several cells (tensor ranks) have copies of, those of one are returned, for the norm; all are set.
        Where nothing is sharded but experts are dealt out, what several ranks have alike is returned by one of them.
        """
        self.roll.turn()
        kept = self.reducer.finish()
        self.tiers.mover.wait_host()
        self.ahead.join()
        for storage, gradient in zip(self.storages, kept):
            storage.master.grad = gradient.to(storage.master.dtype)
        return [gradient for storage, gradient in zip(self.storages, kept) if self.counts(storage.bucket)]

    @property
    def whole(self) -> list[BucketStorage]:
        """The storages whose weights every rank has whole."""
        return [storage for storage in self.storages if isinstance(storage, BucketStorage)]

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.reducer.pool.device

    @property
    def group(self) -> ProcessGroup | None:
        """All ranks that train this model."""
        return self.ranks.world

    @property
    def rank(self) -> int:
        """Of this process, within `group`."""
        return self.ranks.rank

    def owned(self) -> list[Parameter]:
        """The parameters that live in this partition's memory."""
        return [param for storage in (*self.storages, *self.frozen) for param in storage.params]

    def owns(self, param: Parameter) -> bool:
        """Whether `param` lives in this partition's memory."""
        if id(param) in self.watch.unit_of:
            return True
        return any(param is other for other in self.owned())

    @property
    def is_alone(self) -> bool:
        """Whether no other rank takes part."""
        return self.layout.world_size == 1

    def apply(self, step: Callable[[], object], *, any_unused: bool = False) -> None:
        """Run the optimizer's `step` on this rank's shards and publish the result to the module.

        `any_unused` (the same on all ranks) asks to leave parameters that no rank used as they are.

        Raises:
            ValueError: the policy forbids unused parameters and there are some; or a parameter was moved
                out of the flat buffers (`module.half()`, `module.to(...)` after `shard`).
        """
        self.refuse_parked()
        for storage in self.storages:
            if name := storage.moved():
                raise ValueError(
                    f"parameter {name} no longer lives in the partition's memory: module.to(), .half(), .float() or "
                    "an assignment to .data moved it after shard(). Convert the module first, then partition it."
                )
        self.residence.refuse_written()
        unfreezing.refuse(self)
        found = agree_on_unused(self) if any_unused else Unused()
        self.reducer.expect(found.by_some)
        unused = found.by_all
        if self.updates_parameters:
            for gradient in self.reducer.gradients:
                gradient.attach_grads(unused)
        self.residence.release_all()
        stepped = self.ahead.confirm(is_plain=not unused)
        with self.tiers.update(self.storages, self.optimizer, stepped) as groups:
            for group in groups:
                if not stepped.issuperset(group):
                    with self._resting(unused, group):
                        step()
                for index in group:
                    self.storages[index].publish()
        self._show()

    def publish(self) -> None:
        """Make the masters' values visible in the module's parameters, and rank 0's buffers everywhere.

        For those who have written into shards; what they did to frozen ones is shown as well.
        """
        self.refuse_parked()
        self.residence.release_all()
        for storage in (*self.frozen, *self.storages):
            storage.publish()
        self._show()

    def _show(self) -> None:
        """Gather what every rank has published, of the weights that are whole everywhere or that somebody holds."""
        handles = []
        self.tiers.mover.wait_device()
        self.residence.stale()
        for storage in self.whole if self.layout.num_shards > 1 else ():
            label = f"weights[{storage.bucket.index}]"
            holders = self.ranks.having(storage.bucket).shard
            handles.append(zcomm.all_gather(storage.flat, storage.own_span, holders, async_op=True, label=label))
        for handle in handles:
            handle.wait()
        self.bystanders.spread_buffers()

    def zero_grad(self) -> None:
        """Forget all gradients, of frozen and unpartitioned parameters too; this is where a step ends."""
        self.ahead.retract_all()
        self.reducer.reset()
        self.residence.end_step()
        for storage in self.storages:
            storage.master.grad = None
        for param in self.module.parameters():
            param.grad = None

    @contextmanager
    def forgetting(self) -> Iterator[None]:
        """Around the boundary: when it is over, however it ends, no gradient is left."""
        try:
            yield
        finally:
            self.zero_grad()

    def close(self, *, keep_weights: bool = True) -> None:
        """Remove every hook and buffer; the module keeps its weights in memory of its own. Idempotent.

        At stage 3 the weights have to be gathered for that, by all ranks; without `keep_weights`, or where the world
        has failed (`zcomm.failure`) and nothing can be gathered, they read as NaN.
        Whatever fails (a drive, say) is raised when everything else has been given back.
        """
        units = self.residence.units.values() if keep_weights and not zcomm.failure() else ()
        gather = [functools.partial(self.residence.use, unit, exact=True) for unit in units]
        steps: list[Callable[[], object]] = [
            *(self.reload_states, self.drop_parked, self.ahead.close, self.reducer.close, self.watch.close),
            *gather,
            functools.partial(disclaim, self.owned()),
            *(storage.close for storage in (*self.storages, *self.frozen)),
            *(self.tiers.close, self.residence.close),
        ]
        try:
            with ExitStack() as stack:
                for step in reversed(steps):
                    stack.callback(step)
        finally:
            self.storages, self.frozen, self.holders, self.params = (), (), (), {}

    # -- addresses -------------------------------------------------------------------------------

    def shards(self) -> Iterator[Shard | LazyShard]:
        """Weights with their addresses, to be saved: masters where there are any, frozen parameters, buffers."""
        return contents.saved(self)

    def shards_to_fill(self) -> Iterator[Shard]:
        """The same, to be loaded into; what was loaded counts from `publish` on."""
        return contents.to_fill(self)

    def names(self) -> tuple[str, ...]:
        """Names of everything that `shards` yields, over all ranks."""
        frozen = (slot.name for storage in self.frozen for slot in storage.bucket.slots)
        return (*self.params, *frozen, *(name for name, _ in self.bystanders.tensors()))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The global shape of everything that `shards` yields on any rank, by name; the same on all ranks."""
        slots = (slot for storage in (*self.storages, *self.frozen) for slot in storage.bucket.slots)
        return {slot.name: slot.address.global_shape for slot in slots} | self.bystanders.shapes()

    def ledger(self) -> dict[str, int]:
        """Bytes on this rank by owner, see ledger.py; what is not on the module's device is named with its place."""
        return count(self)

    # -- helpers ---------------------------------------------------------------------------------

    def _resting(self, names: frozenset[str], group: Sequence[int]) -> AbstractContextManager[None]:
        """Around the update of these buckets: what is in `names` stays as it is, and the others count their own."""
        holders = self.holders if self.updates_parameters else [self.holders[index] for index in group]
        if self.optimizer is not None and not self.updates_parameters and not shapes.takes_cuts(self.optimizer):
            return in_parts(self.optimizer, holders, names)
        return untouched(self.optimizer, [(h, p) for h in holders if names for p in h.pieces if p.slot.name in names])
