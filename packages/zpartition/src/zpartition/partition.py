"""Partition: a module partitioned over ranks.

`shard(module, optimizer, policy=...)` creates one: it moves the trainable parameters into flat buckets, hooks their
gradients, and rebinds the optimizer onto this rank's spans.  A training step is then

    with partition.micro_step(is_last=True):
        loss.backward()
    partition.finish_gradients()          # accumulators are in the optimizer's .grad
    partition.apply(optimizer.step)       # update this rank's spans, publish them to all views
    partition.zero_grad()

Parameters that no rank used in a step can keep their weights and their optimizer state, step counts included, as in
one process, where their gradient is None: `apply(any_unused=True)`.  The sum of `num_unused` over ranks says whether
there may be any.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, final

import attrs
import torch
from torch import nn

import zcomm
from zpartition import unfreeze as unfreezing
from zpartition.core import NOTHING_OUTSIDE, UNWATCHED, PartitionState, Unused, make_reducer
from zpartition.deferred.init import Deferred, suspend_init
from zpartition.estimate.memory import count_bytes
from zpartition.gradients.bucket import BucketPhase
from zpartition.gradients.speculate import SteppedBucket, start_speculation
from zpartition.layout.address import LazyShard, Shard
from zpartition.layout.layout import Layout
from zpartition.layout.model_parallel import model_parallel_group_of, pipeline_stages_of
from zpartition.layout.policy import Averaging, Offload, OffloadStateType, Speculation, Tier, ZeroPolicy
from zpartition.layout.ranks import Ranks
from zpartition.offload.manager import OffloadManager
from zpartition.offload.offload_states import OffloadedStates, offload_all
from zpartition.ownership import acquire_ownership, one_device, release_ownership
from zpartition.selective.updates import SelectiveUpdates
from zpartition.state import optimizer_state as state
from zpartition.state import shape_aware as shapes
from zpartition.state.unused import have_own_counts, partial_update, preserve_unused
from zpartition.unfreeze import UnfreezeSync
from zpartition.weight_shards import refine_masters, saved_shards, shards_to_fill
from zpartition.weights.hooks import UnshardHooks
from zpartition.weights.rounding import Rounding, check_roundable, round_storages
from zpartition.weights.sharded import ShardedStorage, fill_storages, make_storage
from zpartition.weights.storage import ReplicatedTensors
from zpartition.weights.unshard import Unsharder


@final
@attrs.define(eq=False)
class Partition(PartitionState):
    """One module's memory, gradients and rebound optimizer under one `ZeroPolicy`: the verbs of a training step."""

    offload_manager: OffloadManager = attrs.field(kw_only=True)  # placement of masters, states and reduced gradients
    unfreeze_sync: UnfreezeSync = attrs.field(
        factory=lambda: UnfreezeSync(None)
    )  # agreement of ranks on unfrozen parameters
    offloaded: OffloadedStates | None = None  # states that offload_states has moved
    rounding: tuple[Rounding, frozenset[str]] | None = None  # arguments of `round_by`
    speculation: tuple[Any, Callable[[], torch.Tensor | None]] | None = None  # arguments of `speculate`

    @classmethod
    def create(
        cls,
        module: nn.Module,
        layouts: tuple[Layout, Layout],
        policy: ZeroPolicy,
        ranks: Ranks,
        deferred: Deferred | None = None,
    ) -> Partition:
        """Create the flat buffers and hook the parameters; see `shard`.

        layouts: of the trained parameters, and of the sharded frozen ones.
        """
        layout, frozen = layouts
        everything = dict(module.named_parameters())
        trained = layout.names
        params = {name: param for name, param in everything.items() if name in trained}
        device = one_device(params)
        offload_manager = OffloadManager.create(layout, policy.offload, device, ranks.world)
        storages = tuple(
            offload_manager.adopt(make_storage(bucket, everything, policy, ranks)) for bucket in layout.buckets
        )
        frozen_storages = tuple(
            offload_manager.place_params(ShardedStorage.of(bucket, everything, policy, ranks, False))
            for bucket in frozen.buckets
        )
        units = [s for s in (*storages, *frozen_storages) if isinstance(s, ShardedStorage)]
        if deferred is not None:
            fill_storages(deferred, [*storages, *frozen_storages], ranks.world)
        for unit in units if deferred is None else ():
            unit.adopt(ranks.groups_for(unit.bucket).world)
        owned = [param for storage in (*storages, *frozen_storages) for param in storage.params]
        replicated = ReplicatedTensors.of(module, ranks.world, owned)
        unsharder = Unsharder.of(module, units, policy, ranks, device)
        unshard_hooks = UnshardHooks.install(module, unsharder)
        reducer = make_reducer(module, layout, params, unsharder, device)
        offload_manager.attach(reducer)
        parts = (module, layout, policy, ranks, params, storages, reducer, replicated, unsharder, unshard_hooks)
        partition = cls(*parts, offload_manager=offload_manager)
        partition.frozen, partition.mp_group = frozen_storages, model_parallel_group_of(module)
        partition.pipeline_stages = pipeline_stages_of(module)
        partition.frozen_params = {name: param for name, param in everything.items() if not param.requires_grad}
        partition.unfreeze_sync = UnfreezeSync(
            zcomm.duplicate_host_group(ranks.world) if partition.frozen_params else None
        )
        partition.holders = tuple(state.Holder(s.master, s.pieces(ranks.rank), s.placement) for s in storages)
        acquire_ownership(partition, [*reducer.hooks, unshard_hooks])
        partition.synchronise()
        return partition

    def rebind(self, optimizer: torch.optim.Optimizer) -> None:
        """Let `optimizer` update this partition's shards instead of the module's parameters."""
        cuts = self.layout.num_shards > 1 or not all(s.shares_master for s in self.storages)
        state.check_optimizer(optimizer, cuts=cuts)
        num_groups = len(optimizer.param_groups)
        self.frozen_groups = unfreezing.frozen_groups_of(self, optimizer)
        places_cuts = cuts and shapes.accepts_cuts(optimizer)
        if not places_cuts and not state.is_elementwise(optimizer):
            self.holders = tuple(state.Holder.of_parameter(n, p) for n, p in self.params.items())
            self.updates_parameters = True
        else:
            masters = [holder.tensor for holder in self.holders]
            if places_cuts:
                self.offload_manager.step_all_at_once()
            place = functools.partial(
                shapes.place_over_ranks, optimizer, masters, self.layout, self.ranks.shard, self.device
            )
            held: list[list[state.Holder]] = [[] for _ in range(num_groups)]
            for storage, holder in zip(self.storages, self.holders):
                held[storage.bucket.group].append(holder)
            state.rebind(optimizer, held, self.params, place if places_cuts else lambda: None)
        self.optimizer = optimizer
        self.offload_manager.hook(optimizer, self.storages)
        self.speculate(optimizer, lambda: getattr(optimizer, "grad_scale", None))
        self.updates.close()
        if self.policy.offload.selective.is_on:
            self.updates = SelectiveUpdates(self, optimizer, self.offload_manager.mover, _usable_cores())

    def speculate(self, scaled: Any, expected_divisor: Callable[[], torch.Tensor | None]) -> None:
        """Enable speculative steps, if the policy has them.

        scaled: the optimizer, or a wrapper that divides for it: `step()` reads its attribute `grad_scale`, as in
        `apply`.
        expected_divisor: called when the last backward of a step begins; None divides by 1.
        """
        if self.policy.offload.speculation is Speculation.OFF or self.updates_parameters or self.optimizer is None:
            return
        self.speculative_step.close()
        self.speculation = scaled, expected_divisor
        buckets = [SteppedBucket(*pair) for pair in zip(self.holders, self.reducer.gradients)]
        num_cores = self.policy.offload.num_cores(_usable_cores())
        self.speculative_step = start_speculation(
            buckets, self.optimizer, scaled, expected_divisor, self.offload_manager.mover, num_cores
        )

    def synchronise(self) -> None:
        """Broadcast rank 0's weights, frozen parameters and buffers; weights of units are equal already."""
        self.check_resident()
        for storage in self.whole:
            holders = self.ranks.groups_for(storage.bucket).world
            zcomm.broadcast(storage.flat, holders, source=0, label=f"weights[{storage.bucket.index}]")
            storage.refresh_master()
        self.replicated.synchronise()

    def refine(self, values: Mapping[str, torch.Tensor]) -> None:
        """Copy `values` (by parameter) into masters, where their dtype is wider than the module's weights.

        Call it after the module was loaded and synchronized: 16-bit weights leave rounded values in the masters.  All
        ranks call, with the same shapes; rank 0's values are used.
        """
        if refine_masters(self, values):
            self.publish()

    def admit_unfrozen(self) -> tuple[str, ...]:
        """Train parameters that were frozen when the module was partitioned and now require a gradient.

        Returns their names.  Call it between two steps, on all ranks, if there are frozen parameters.  Weights and
        states of other parameters do not move.  See unfreeze.py.

        Raises:
            ValueError: in the middle of a step; ranks have unfrozen different parameters; or the optimizer has no
                parameter group for one.
        """
        names = unfreezing.admit(self, self.offload_manager, self.unfreeze_sync)
        if names and self.speculation is not None:
            self.speculate(*self.speculation)
        return names

    def rollback_speculation(self) -> None:
        """Undo updates that began in the last backward, so that masters and states are those of the last step.

        `apply` then makes all updates itself.
        """
        self.speculative_step.rollback_all()

    # -- a step ----------------------------------------------------------------------------------

    @contextmanager
    def micro_step(self, *, is_last: bool = True, is_local: bool = False, is_scaled: bool = False) -> Iterator[None]:
        """Run one backward inside.

        is_last: a step follows.
        is_local: nothing is sent; gradients accumulate on this rank, unsharded and in the parameters' dtype at any
            stage, until a later backward or `finish_gradients` reduces them.  The same on all ranks.
        is_scaled: the loss is multiplied by a factor that the step divides out (a loss scale, say), so `.grad` of
            parameters does not show their gradients; see placeholder.py.
        """
        self.check_resident()
        self.unshard_hooks.drop_finished()
        self.unfreeze_sync.wait()
        if is_last and not is_local:
            self.speculative_step.begin()
        try:
            with (
                self.unsharder.backward(),
                self.reducer.round(is_last=is_last, is_local=is_local, is_scaled=is_scaled),
            ):
                yield
        except BaseException:
            self.unshard_hooks.reset()
            self.unsharder.reset()
            raise

    @contextmanager
    def derivatives(self) -> Iterator[None]:
        """Call `torch.autograd.grad` inside, on the graph of a micro-step before its backward; nothing is reduced.

        Units are gathered as in a backward; all ranks call it alike.  With `create_graph=True` the graph holds a copy
        of each gathered weight until it is dropped.
        """
        with self.reducer.clock.paused(), self.unsharder.derivatives():
            yield

    def finish_gradients(self, *, any_late: bool | None = None) -> list[torch.Tensor]:
        """Set `.grad` on every master and return the mean gradients that this rank counts, flat, by bucket.

        A parameter replicated over model-parallel ranks is returned on one of them only, so that the norm counts it
        once.  If only experts are sharded, gradients that several ranks hold are returned by one of them.

        any_late: whether some rank (model-parallel ones included) has gradients that arrived after their bucket was
            sent, because this backward differs from the first: the sum of `num_late`.  They are then sent, too.
            False leaves them out, until a second call.  None asks the ranks, where that can happen.
        """
        self.unfreeze_sync.reset()
        kept = self.reducer.finish(any_late=any_late)
        self.offload_manager.mover.wait_host()
        self.speculative_step.join()
        for storage, gradient in zip(self.storages, kept):
            master = storage.master
            master.grad = gradient if gradient.dtype is master.dtype else gradient.to(master.dtype)
        if not self.reducer.reduces:
            return self.own_gradients()
        return [gradient for storage, gradient in zip(self.storages, kept) if self.is_counted(storage.bucket)]

    def apply(self, step: Callable[[], object], *, any_unused: bool = False) -> None:
        """Run the optimizer's `step` on this rank's shards and publish the result to the module.

        any_unused: leave parameters that no rank used unchanged.  The same on all ranks.

        Raises:
            ValueError: the policy forbids unused parameters and there are some; or a parameter was moved
                out of the flat buffers (`module.half()`, `module.to(...)` after `shard`).
        """
        # 1. Check that nothing is offloaded, moved, written to while sharded, or unfrozen in the meantime.
        self.check_resident()
        self._check_in_place()
        self.unsharder.check_unwritten()
        unfreezing.check_frozen(self)
        # 2. Agree on unused parameters, which keep weights and states.
        found = self.agree_on_unused() if any_unused else Unused()
        self.reducer.expect_missing(found.by_some)
        unused = self.unused = found.by_all
        if self.updates_parameters and self.optimizer is not None:
            sparse = state.sparse_params(self.optimizer)
            for gradient in self.reducer.gradients:
                gradient.attach_grads(unused, sparse)
        # 3. Update the masters, and publish them.
        self.unsharder.release_all()
        self.updates.apply(functools.partial(self._update_all, step, unused))
        # 4. Gather what all ranks have published.
        self._gather_published()

    def _update_all(self, step: Callable[[], object], unused: frozenset[str]) -> None:
        """Update the buckets group by group, except those that a speculative step has updated; publish each."""
        stepped = self.speculative_step.confirm(is_plain=not unused)
        with self.offload_manager.update(self.storages, self.optimizer, stepped) as groups:
            for group in groups:
                if not stepped.issuperset(group):
                    with self._preserving_unused(unused, group):
                        step()
                for index in group:
                    self.storages[index].publish()

    def publish(self) -> None:
        """Show the masters' values in the module's parameters, and broadcast rank 0's buffers.

        Call it after shards were written; frozen shards are published as well.
        """
        self.check_resident()
        self.unsharder.release_all()
        for storage in (*self.frozen, *self.storages):
            storage.publish()
        self.updates.published()
        self._gather_published()
        self.round_weights()

    def round_by(self, rounding: Rounding, names: Collection[str]) -> None:
        """Round weights with `rounding` from now on: after each `publish`, and when `round_weights` is called.

        Modules then see rounded weights, and the masters keep theirs; see rounding.py.

        rounding: called with the name and the whole weight, to change in place; the same result on every rank.
        names: weights to round.

        Raises:
            ValueError: a weight has no master of its own.
        """
        check_roundable(self.storages, names)
        self.rounding = rounding, frozenset(names)

    def round_weights(self) -> None:
        """Round the published weights by `round_by`; call it after `apply`, on every rank."""
        if self.rounding is not None:
            self.check_resident()
            round_storages(self.storages, self.unsharder, *self.rounding)

    def _gather_published(self) -> None:
        """Gather published weights that are not sharded, or that a running call holds."""
        handles = []
        self.offload_manager.mover.wait_device()
        self.unsharder.invalidate()
        for storage in self.whole if self.layout.num_shards > 1 else ():
            group = self.ranks.groups_for(storage.bucket).shard
            handles.append(storage.gather(group, self.policy.gather_numel, self.reducer.pool))
        for handle in handles:
            handle.wait()
        if not self.is_alone:
            self.replicated.broadcast_buffers()

    def average(self, averaging: Averaging) -> None:
        """Turn sums over ranks into means by `averaging` from now on; all ranks call.

        Raises:
            RuntimeError: parameters have gradients that were divided already.
        """
        if any(param.grad is not None for param in self.params.values()):
            raise RuntimeError("parameters have gradients: change the averaging after step(), or set .grad to None")
        self.zero_grad()
        self.policy = attrs.evolve(self.policy, averaging=averaging)
        self.reducer.average(averaging)

    def reduce_gradients(self, reduces: bool) -> None:
        """Reduce gradients from the next step on, or keep each rank's own ones; the same on all ranks.

        Without reduction `finish_gradients` returns whole local gradients, `.grad` of masters and parameters shows
        them, and `sum_over_shards` averages sums of squares over ranks.  Stages 0 and 1.

        Raises:
            RuntimeError: in the middle of a step.
            ValueError: the policy shards gradients, offloads states, or sends sparse rows.
        """
        if reduces == self.reducer.reduces:
            return
        if any(gradient.seen for gradient in self.reducer.gradients):
            raise RuntimeError("gradients of this step exist: change their reduction after step() or zero_grad()")
        check_local_gradients(self.policy, self.layout)
        self.reducer.reduce_gradients(reduces)

    def zero_grad(self) -> None:
        """End a step: drop all gradients, also of frozen and unpartitioned parameters."""
        self.speculative_step.rollback_all()
        self.reducer.reset()
        self.unsharder.end_step()
        for storage in self.storages:
            storage.master.grad = None
        for param in self.parameters_outside():
            param.grad = None

    @contextmanager
    def zero_grad_on_exit(self) -> Iterator[None]:
        """Call `zero_grad` when the block ends, however it ends."""
        try:
            yield
        finally:
            self.zero_grad()

    @suspend_init()
    def close(self, *, keep_weights: bool = True) -> None:
        """Remove every hook and buffer; the module keeps its weights in its own memory.  Idempotent.

        At stage 3 all ranks gather the weights; without `keep_weights`, or after the world has failed
        (`zcomm.failure`), parameters read as NaN.  The first error (of a drive, say) is raised after everything else
        is released.
        """
        units = self.unsharder.units.values() if keep_weights and not zcomm.failure() else ()
        gather = [functools.partial(self.unsharder.unshard, unit, exact=True) for unit in units]
        steps: list[Callable[[], object]] = [
            *(
                self.reload_states,
                self.drop_offloaded,
                self.updates.close,
                self.speculative_step.close,
                self.reducer.close,
                self.unshard_hooks.close,
            ),
            *gather,
            functools.partial(release_ownership, self),
            *(storage.close for storage in (*self.storages, *self.frozen)),
            *(self.offload_manager.close, self.unsharder.close),
        ]
        try:
            with ExitStack() as stack:
                for step in reversed(steps):
                    stack.callback(step)
        finally:
            self.storages, self.frozen, self.holders, self.params = (), (), (), {}
            self.watch, self.outside = UNWATCHED, NOTHING_OUTSIDE

    def gradient_errors(self) -> Iterator[zcomm.ErrorFeedback]:
        """Yield the errors of quantized gradients that the next messages make up for; empty without feedback."""
        for reduction in self.reducer.reductions.values():
            yield from reduction.errors.values()

    # -- offloaded states --------------------------------------------------------------------------

    def offload_states(
        self,
        include: Collection[OffloadStateType | str] = tuple(OffloadStateType),
        *,
        pin: bool = True,
        directory: str = "",
    ) -> None:
        """Move states off the device, to the host or into files, until `reload_states`.

        Every rank calls, between steps.  Until `reload_states` the partition raises RuntimeError when it is used.

        include: `OffloadStateType` members, or DeepSpeed's names.
        directory: for files; "": the host.

        Raises:
            ValueError: in the middle of a step; or an unknown name.
            DiskError, MemoryError and similar, or RuntimeError if another rank failed: nothing is moved then.
        """
        self.check_resident()
        kinds = frozenset(OffloadStateType(each) for each in include)
        if any(
            gradient.kept is not None or gradient.phase is BucketPhase.FILLING for gradient in self.reducer.gradients
        ):
            raise ValueError("offload_states() in the middle of a step would lose gradients; call it between steps")
        tier = Tier.DISK if directory else Tier.HOST
        self.updates.settle()
        self.offloaded = offload_all(self, kinds, Offload(states=tier, directory=directory, pin=pin))
        self.unsharder.offloaded = kinds

    def reload_states(self) -> None:
        """Reload offloaded states, bit for bit; does nothing if there are none.  Every rank calls.

        Raises:
            DiskError, MemoryError and similar, or RuntimeError if another rank failed: all stay offloaded then.
        """
        if self.offloaded is not None:
            self.offloaded.reload(self)
            self.drop_offloaded()

    def drop_offloaded(self) -> None:
        """Drop offloaded states."""
        self.unsharder.offloaded = None
        if self.offloaded is not None:
            self.offloaded.close()
            self.offloaded = None

    # -- addresses -------------------------------------------------------------------------------

    def shards(self) -> Iterator[Shard | LazyShard]:
        """Yield weights with their addresses, to be saved: masters if any, frozen parameters, buffers."""
        return saved_shards(self)

    def shards_to_fill(self) -> Iterator[Shard]:
        """Yield the same addresses with memory to load into; `publish` makes the loaded values current."""
        return shards_to_fill(self)

    def names(self) -> tuple[str, ...]:
        """Return the names of everything that `shards` yields, over all ranks."""
        frozen = (slot.name for storage in self.frozen for slot in storage.bucket.slots)
        return (*self.params, *frozen, *(name for name, _ in self.replicated.tensors()))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the global shape of everything that `shards` yields on any rank, by name; equal on all ranks."""
        slots = (slot for storage in (*self.storages, *self.frozen) for slot in storage.bucket.slots)
        return {slot.name: slot.address.global_shape for slot in slots} | self.replicated.shapes()

    def ledger(self) -> dict[str, int]:
        """Return the bytes on this rank by owner; owners off the module's device are named with their place."""
        return count_bytes(self, self.offload_manager.held_bytes()) | dict(self.held_beside())

    # -- helpers ---------------------------------------------------------------------------------

    def _check_in_place(self) -> None:
        """Raise ValueError if a parameter was moved; looks at each unless the watch shows that none was."""
        watched, are_in_place = self.watch
        if watched is self.storages and are_in_place():
            return
        for storage in self.storages:
            if name := storage.moved():
                raise ValueError(
                    f"parameter {name} no longer lives in the partition's memory: module.to(), .half(), .float() or "
                    "an assignment to .data moved or transposed it after shard(). Convert the module first, then "
                    "partition it."
                )
        whole = self.whole
        if len(whole) == len(self.storages):  # weights of units move in every step
            tensors = [tensor for storage in whole for tensor in (storage.flat, *storage.params)]
            self.watch = self.storages, self.watch_tensors(tensors)

    def _preserving_unused(self, names: frozenset[str], group: Sequence[int]) -> AbstractContextManager[None]:
        """Wrap the update of these buckets: parameters in `names` keep weights and state, others count their own."""
        holders = self.holders if self.updates_parameters else [self.holders[index] for index in group]
        if not names and not have_own_counts(self.optimizer, holders):
            return nullcontext()
        if self.optimizer is not None and not self.updates_parameters and not shapes.accepts_cuts(self.optimizer):
            return partial_update(self.optimizer, holders, names)
        return preserve_unused(
            self.optimizer, [(h, p) for h in holders if names for p in h.pieces if p.slot.name in names]
        )


def check_local_gradients(policy: ZeroPolicy, layout: Layout) -> None:
    """Raise ValueError unless every rank can keep its own whole gradients, and every rank owns one span or all."""
    reasons = {
        f"ZeRO stage {policy.stage} shards gradients": policy.stage > 1,
        "optimizer states are offloaded": policy.offload.moves_states,
        "gradients are sparse": any(bucket.is_sparse for bucket in layout.buckets),
        "experts are sharded": layout.is_expert_sharded,
        f"{layout.num_shards} of {layout.world_size} ranks share a copy": 1 < layout.num_shards < layout.world_size,
        "gradients are quantized": bool(policy.gradient_bits),
    }
    found = [reason for reason, is_true in reasons.items() if is_true]
    if found:
        raise ValueError(
            f"local gradients are not possible, because {' and '.join(found)}. Use ZeRO stage 0 or 1, dense "
            "gradients, and nothing that offloads or shards besides."
        )


def _usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
