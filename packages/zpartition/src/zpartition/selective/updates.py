"""Selective updates of one partition: columns on the device, the rest on the host; see layout/selective.py.

Two optimizers of the caller's class do the work.  One steps the columns: a copy of their masters and moments, on the
device.  The other steps the masters on the host, whole: what it makes of selected columns is never read, as a gap in
a flat shard would cost more than the columns in it.  Both take their options from the caller's optimizer when their
update begins, so that a schedule may go on beside a thread.

The columns' copy is ahead of the host while steps run.  Whatever reads or writes masters or states (checkpoints,
edits of weights, `close`) first waits for the thread and brings the columns to the host (`HostPlacement.
before_access`); the next step reads them again.  So saving changes nothing, and at that moment masters and states are
those of one AdamW with two step counts.

A checkpoint has in addition the pending gradients, the selection and the counts; and, while an update of the rest is
made but not shown, the weights that are shown.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from zpartition.core import PartitionState, Updates
from zpartition.gradients.speculate import limit_threads
from zpartition.layout.address import Shard
from zpartition.memory.mover import Mover
from zpartition.memory.placement import HostPlacement
from zpartition.selective.selection import Selection
from zpartition.selective.shards import (
    MOMENTS,
    STEP,
    SelectedShard,
    check_layout,
    check_optimizer,
    copy_options,
    held_bytes,
    shards_of,
    sibling_of,
    step_count,
)

__all__ = ["SelectiveUpdates"]


@final
class SelectiveUpdates(Updates):
    """Updates of `partition` by `policy.offload.selective`; `optimizer` is Adam or AdamW, rebound to its masters.

    Raises:
        ValueError: another optimizer, or states that are not plain float32.
    """

    def __init__(
        self, partition: PartitionState, optimizer: torch.optim.Optimizer, mover: Mover, num_cores: int
    ) -> None:
        check_optimizer(optimizer)
        check_layout(partition)
        self.policy = partition.policy.offload.selective
        self.num_steps = 0  # applied
        self.num_updates = 0  # of the columns: t
        self.num_pending = 0  # steps in `pending`
        self._partition = weakref.proxy(partition)  # which holds this object
        self._optimizer, self._mover = optimizer, mover
        self._scaled: Any = None
        count = 1 + self.policy.overlap
        self._parts = [
            SelectedShard(
                s, Parameter(s.master.data), [mover.empty(s.master.numel(), s.master.dtype) for _ in range(count)]
            )
            for s in partition.storages
        ]
        self.selection = Selection(self._partition, self._parts)
        self._fast, self._rest = sibling_of(optimizer), sibling_of(optimizer)
        self._thread = ThreadPoolExecutor(1, "zpartition-selective")
        if num_threads := self.policy.num_threads(num_cores):
            limit_threads(self._thread, num_threads)
        self._running: Future[None] | None = None
        self._is_unshown = False  # the rest has an update that the module does not show
        self._is_ahead = False  # the columns' copy is newer than the host's
        self._has_loaded = False  # a load has filled `SelectedShard.shown`, and the masters are not published yet
        settle = weakref.WeakMethod(self.settle)
        for part in self._parts:
            assert isinstance(part.storage.placement, HostPlacement)
            part.storage.placement.before_access = lambda: _call(settle)
        self._hooks: list[RemovableHandle] = [
            optimizer.register_state_dict_pre_hook(lambda _: _call(settle)),
            optimizer.register_load_state_dict_pre_hook(lambda *_: _call(settle)),
        ]

    # -- a step ------------------------------------------------------------------------------------

    def divide_by(self, scaled: Any) -> None:
        self._scaled = scaled

    @torch.no_grad()
    def apply(self, update_all: Callable[[], None]) -> None:
        self._check_buckets()
        step, policy = self.num_steps, self.policy
        if step < policy.warm_up:
            self._add_pending(self._factor())
            self._update_rest_now()
        else:
            # 1. Select columns; the rest is shown then, and nothing is pending.
            if policy.selects(step) or not self.selection.exists:
                self._show_rest()
                if self.num_pending:  # of a checkpoint under other intervals
                    self._end_interval_early()
                self.select(self.selection.choose())
            if not self._is_ahead:
                self._read_columns()
            # 2. Add the gradient to what is pending, and update the columns.
            factor = self._factor()
            self._add_pending(factor)
            self._update_columns(factor)
            # 3. At the end of an interval update the rest, and show what is complete.
            if policy.ends_interval(step) or (
                not policy.update_every and self.selection.is_ripe(factor, self.num_pending)
            ):
                self._end_interval()
            else:
                self._show_columns()
        self.num_steps = step + 1

    def _factor(self) -> float:
        """Return the reciprocal of the gradients' divisor."""
        divisor = None if self._scaled is None else self._scaled.grad_scale
        return 1.0 if divisor is None else 1.0 / float(divisor)

    @torch.no_grad()
    def select(self, chosen: Mapping[str, Tensor]) -> None:
        """Update these columns, (k,) int64 by matrix, in every step from now on; all ranks call together.

        Raises:
            ValueError: parameters of any rank have different numbers of updates; on all ranks, and nothing changes.
        """
        self.settle()
        num_rest = self.selection.agreed_count(self._num_updates())
        if not self.selection.exists:
            self.num_updates = num_rest
        before = [part.columns for part in self._parts]
        self.selection.set(chosen)
        for part, columns in zip(self._parts, before):
            if columns is not None:
                group = self._optimizer.param_groups[part.storage.bucket.group]
                part.carry(columns.index, self._optimizer.state[part.master], group, (num_rest, self.num_updates))
        self._place_columns()

    def _num_updates(self) -> set[float]:
        """Return the numbers of updates of this rank's masters; creates the states of those without."""
        counts = set()
        for part in self._parts:
            state = self._optimizer.state[part.master]
            if not state:
                state.update({STEP: torch.zeros(()), **{key: torch.zeros_like(part.master.data) for key in MOMENTS}})
            counts |= {float(number) for number in torch.as_tensor(state[STEP]).view(-1)}
        return counts

    def _place_columns(self) -> None:
        """Allocate the columns' copy, and give it to its optimizer."""
        device = self._partition.device
        home = torch.device("cpu") if self.policy.has_host_moments else device
        self._fast.state.clear()
        for group in self._fast.param_groups:
            group["params"] = []
        for part in self._parts:
            part.place_columns(device, home)
            self._fast.param_groups[part.storage.bucket.group]["params"].append(part.fast)
        self._is_ahead = False

    def _read_columns(self) -> None:
        for part in self._parts:
            part.read_columns(self._optimizer.state[part.master])

    @torch.no_grad()
    def settle(self) -> None:
        """Wait for the thread, and copy the columns to the host, whose masters and states are then complete."""
        running, self._running = self._running, None
        if running is not None:
            running.result()
        if self._is_ahead:
            for part in self._parts:
                part.write_columns(self._optimizer.state[part.master])
            self._is_ahead = False

    def _add_pending(self, factor: float) -> None:
        for part in self._parts:
            if self.num_pending:
                part.pending[0].add_(part.gradient, alpha=factor)
            else:
                torch.mul(part.gradient, factor, out=part.pending[0])
        self.num_pending += 1

    def _update_columns(self, factor: float) -> None:
        """Step the columns with the gradient times `factor`; bucket by bucket, if their moments are on the host."""
        copy_options(self._optimizer, self._fast)
        self._is_ahead = True
        for parts in [[part] for part in self._parts] if self.policy.has_host_moments else [self._parts]:
            for part in parts:
                part.fast.grad = torch.empty_like(part.fast.data)
                self._mover.send(part.fast.grad, part.gradient[part.selection.index].mul_(factor))
                moments = {key: value.to(part.fast.device) for key, value in part.moments.items()}
                count = step_count(self._fast, part.fast, self.num_updates)
                self._fast.state[part.fast] = {STEP: count, **moments}
            self._mover.wait_device()
            self._fast.step()
            for part in parts:
                part.fast.grad = None
                for key, value in part.moments.items():
                    value.copy_(self._fast.state[part.fast][key])
                if self.policy.has_host_moments:
                    self._fast.state.pop(part.fast)
        self.num_updates += 1

    def _end_interval(self) -> None:
        """Update the rest with the mean of the pending gradients: now, or in the thread."""
        if not self.policy.overlap:
            self._update_rest_now()
            return
        self._show_rest()
        self._show_columns()
        self._is_ahead = True  # the copy is what the host has, until the thread overwrites it there
        self._is_unshown = True
        self._running = self._thread.submit(self._update_rest, *self._take_pending())
        for part in self._parts:
            part.pending.reverse()

    def _end_interval_early(self) -> None:
        """Update the rest with what is pending, before other columns are selected."""
        if not self._is_ahead:
            self._read_columns()
            self._is_ahead = True
        self._update_rest_now()

    def _take_pending(self) -> tuple[list[Tensor], int]:
        """Return the pending gradients and their number, and begin another interval."""
        for index, group in enumerate(copy_options(self._optimizer, self._rest)):
            group["params"] = [part.rest for part in self._parts if part.storage.bucket.group == index]
        count, self.num_pending = self.num_pending, 0
        self.selection.magnitudes.zero_()
        return [part.pending[0] for part in self._parts], count

    def _update_rest_now(self) -> None:
        self._update_rest(*self._take_pending())
        self._show_all()

    @torch.no_grad()
    def _update_rest(self, gradients: Sequence[Tensor], count: int) -> None:
        """Step the masters on the host with `gradients` / `count`; in the thread, if there is one."""
        for part, gradient in zip(self._parts, gradients):
            part.rest.data = part.master.data
            part.rest.grad = gradient if count == 1 else gradient.div_(count)
            self._rest.state[part.rest] = self._optimizer.state[part.master]
        self._rest.step()
        for part in self._parts:
            part.rest.grad = None

    # -- showing -----------------------------------------------------------------------------------

    def _show_all(self) -> None:
        """Publish all masters, the columns' included."""
        for part in self._parts:
            part.storage.publish()
        self._is_unshown = False

    def _show_rest(self) -> None:
        """Publish the update of the rest that is not shown, if there is one; waits for it."""
        if self._is_unshown:
            self._show_all()

    def _show_columns(self) -> None:
        """Copy the columns into the module's weights; after whatever is on its way to them."""
        self._mover.wait_device()
        for part in self._parts:
            part.show_columns()

    @torch.no_grad()
    def finish(self) -> None:
        if self._is_unshown:
            partition = self._partition
            self._show_all()
            self._mover.wait_device()
            for storage in partition.whole if partition.layout.num_shards > 1 else ():
                storage.gather(partition.ranks.shard, partition.policy.gather_numel, partition.reducer.pool).wait()

    @torch.no_grad()
    def published(self) -> None:
        self._is_unshown = False
        self._mover.wait_device()
        for part in self._parts:
            if part.shown is not None and self._has_loaded:
                part.storage.own_span.copy_(part.shown)
                self._is_unshown = True
            part.shown = None  # that of a load which failed is dropped
        self._has_loaded = False

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, and the selection's state."""
        return {
            "steps": self.num_steps,
            "updates": self.num_updates,
            "pending": self.num_pending,
            "unshown": self._is_unshown,
            **self.selection.state_dict(),
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError for a state of another model."""
        counts = {key: state.get(key) for key in ("steps", "updates", "pending")}
        if not all(type(count) is int and count >= 0 for count in counts.values()):
            raise ValueError(f"{counts} is no state: counts must be whole numbers")
        if type(state.get("unshown")) is not bool:
            raise ValueError(f"unshown = {state.get('unshown')!r} is no state: it must be true or false")
        self.selection.check_state(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`, after masters, optimizer states and `shards` were restored."""
        self.check_state(state)
        self.settle()
        self.selection.clear()
        self.num_steps, self.num_pending = int(state["steps"]), int(state["pending"])
        if columns := self.selection.saved_columns(state):
            self.select(columns)
        self.num_updates = int(state["updates"])
        self.selection.load_magnitudes(state)
        self._has_loaded = True

    def reset(self) -> None:
        """Drop what is pending, and begin as in the first step: other weights or states were loaded."""
        self.settle()
        self.num_steps = self.num_updates = self.num_pending = 0
        self._is_unshown = self._has_loaded = False
        self.selection.clear()

    def pending_shards(self) -> Iterator[Shard]:
        """Yield the pending gradients with their addresses: live memory, to save or to load into."""
        yield from self._shards([part.pending[0] for part in self._parts])

    def shown_shards(self) -> Iterator[Shard]:
        """Yield the weights that the module shows, to save, if the masters have a newer rest."""
        if self._is_unshown:
            yield from self._shards([part.storage.own_span for part in self._parts])

    def prepare_shown(self, *, is_unshown: bool) -> None:
        """Allocate memory for such weights, or drop it."""
        for part in self._parts:
            part.shown = torch.zeros_like(part.storage.own_span) if is_unshown else None

    def shards_to_show(self) -> Iterator[Shard]:
        """Yield that memory, to load into; the module shows it once all masters were `published`."""
        if shown := [part.shown for part in self._parts if part.shown is not None]:
            yield from self._shards(shown)

    def _shards(self, values: Sequence[Tensor]) -> Iterator[Shard]:
        return shards_of(self._parts, values, self._partition.rank)

    def ledger(self) -> dict[str, int]:
        return held_bytes(self._parts, self._partition.device)

    def close(self) -> None:
        try:
            self.settle()
        finally:
            for hook in self._hooks:
                hook.remove()
            self._thread.shutdown()
            for part in self._parts:
                assert isinstance(part.storage.placement, HostPlacement)
                part.storage.placement.before_access = _nothing

    def _check_buckets(self) -> None:
        if len(self._parts) != len(self._partition.storages):
            raise ValueError(
                "parameters were unfrozen, and selective updates (zenflow) train those that they began with. "
                "Unfreeze them before initialize(), or save a checkpoint and go on in a new run."
            )


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    if (alive := method()) is not None:
        alive()


def _nothing() -> None:
    """Stand in for a closed partition's updates."""
