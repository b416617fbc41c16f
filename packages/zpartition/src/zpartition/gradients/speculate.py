"""Speculative step: the optimizer updates a bucket as soon as its gradient is complete.

Problem.  With states on the host, the update begins when backward ends, and the device waits.  But its other inputs
are nearly always known: gradients are finite, and mostly not clipped.

Design (SuperOffload, Lian et al. 2025).  In the last backward of a step a thread updates each reduced bucket on the
host with the expected divisor (the loss scale alone), and keeps a copy of its old values.  `confirm` later compares
the assumptions with the facts: the divisor, the options of the parameter groups, and that the gradients were not
modified since.  Correct updates are published; all others are rolled back bit for bit and stepped as usual.  A
skipped step never calls `confirm`, and `rollback_all` restores everything.

It costs a copy of the host's masters and states ("host rollback" in the ledger), and reading and writing it; and, for
an optimizer that may write into gradients (torch's fused ones leave them divided), a copy of one bucket's gradient.

Rejected.  Computing the old values from the new ones (not exact); two alternating sets of states (optimizers update
in place); speculation on disk, where `discard` would do, but every wrong guess writes everything twice.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, cast, final

import attrs
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from zpartition import _compat
from zpartition.layout.policy import Tier
from zpartition.memory.mover import Mover
from zpartition.memory.placement import HostPlacement, MasterPlacement
from zpartition.state.counts import is_large
from zpartition.state.optimizer_state import Holder
from zpartition.state.shape_aware import accepts_cuts
from zpartition.state.unused import partial_update

__all__ = ["NO_SPECULATION", "SpeculativeStep", "SteppedBucket", "limit_threads", "start_speculation"]


class ReducedGradient(Protocol):
    """A bucket's gradient, as far as a speculative step sees it."""

    kept: Tensor | None  # (span numel,) the reduced sum
    speculative_step: SpeculativeStep  # notified when the gradient is complete, and when it changes again


@attrs.frozen(eq=False)
class SteppedBucket:
    """A bucket as seen by a speculative step."""

    holder: Holder
    gradient: ReducedGradient

    @property
    def master(self) -> Parameter:
        return self.holder.tensor

    @property
    def placement(self) -> MasterPlacement:
        return cast(MasterPlacement, self.holder.placement)


class SpeculativeStep:
    """The identity: no speculation."""

    num_bytes = 0  # of copies for rollback
    num_confirmed = 0  # updates of buckets that were confirmed, in total
    num_rolled_back = 0  # updates of buckets that were rolled back, in total

    def begin(self) -> None:
        """Start the last backward of a step: complete buckets may be stepped."""

    def gradient_ready(self, index: int) -> None:
        """Notify that the gradient of a bucket is complete, as far as is known."""

    def rollback(self, index: int) -> None:
        """Restore a bucket whose gradient changes, or is not used; waits for its update."""

    def join(self) -> None:
        """Wait for all updates."""

    def rollback_all(self) -> None:
        """Restore all buckets."""

    def confirm(self, is_plain: bool) -> frozenset[int]:
        """Return the buckets whose update is valid; restores the others.  is_plain: no parameter counts as unused."""
        return frozenset()

    def close(self) -> None:
        """Restore all buckets and end the thread."""


NO_SPECULATION = SpeculativeStep()


@attrs.define(eq=False)
class _Undo:
    """State of a bucket before its update; the memory is reused in the next step."""

    master: Tensor  # (span numel,)
    copies: dict[str, Tensor] = attrs.field(factory=dict)  # by state key
    entry: dict[str, Any] | None = None  # the optimizer's state; None: it had none
    version: int = 0  # of the gradient that was read
    is_saved: bool = False  # there is something to restore

    def save(self, optimizer: torch.optim.Optimizer, master: Parameter) -> None:
        """Copy master and state before the update."""
        self.master.copy_(master.data)
        entry = optimizer.state.get(master)
        self.entry = None if entry is None else dict(entry)
        for key, value in (entry or {}).items():
            if isinstance(value, Tensor):
                kept = self.copies.get(key)
                if kept is None or kept.shape != value.shape or kept.dtype != value.dtype:
                    kept = self.copies[key] = torch.empty_like(value)
                kept.copy_(value)
        self.is_saved = True

    def restore(self, optimizer: torch.optim.Optimizer, master: Parameter) -> None:
        """Restore the last `save`, into the same tensors."""
        if not self.is_saved:
            return
        master.data.copy_(self.master)
        if self.entry is None:
            optimizer.state.pop(master, None)
            return
        for key, value in self.entry.items():
            if isinstance(value, Tensor):
                value.copy_(self.copies[key])
        entry = optimizer.state[master]
        entry.clear()
        entry.update(self.entry)

    @property
    def num_bytes(self) -> int:
        """Bytes of the copies."""
        return self.master.nbytes + sum(value.nbytes for key, value in self.copies.items() if is_large(key, value))


def start_speculation(
    buckets: Sequence[SteppedBucket],
    optimizer: torch.optim.Optimizer,
    scaled: Any,
    expected_divisor: Callable[[], Tensor | None],
    mover: Mover,
    num_cores: int = 0,
) -> SpeculativeStep:
    """Start a thread that steps `buckets`; none for an optimizer that looks at whole tensors.

    num_cores: threads that a kernel may use in it; 0: torch's number.
    """
    if accepts_cuts(optimizer):  # its step communicates, which a thread must not
        name = type(optimizer).__name__
        warnings.warn(f"speculation has no effect: {name} needs whole tensors, over all ranks", stacklevel=3)
        return NO_SPECULATION
    made = SpeculativeThread(buckets, optimizer, scaled, expected_divisor, mover)
    if num_cores:
        limit_threads(made.thread, num_cores)
    for index, bucket in enumerate(buckets):
        bucket.gradient.speculative_step = made
        if isinstance(bucket.placement, HostPlacement):
            bucket.placement.before_access = functools.partial(made.rollback, index)
    rollback_all = weakref.WeakMethod(made.rollback_all)  # the optimizer may outlive the partition
    made.hooks.append(optimizer.register_state_dict_pre_hook(lambda _: _call(rollback_all)))
    made.hooks.append(optimizer.register_load_state_dict_pre_hook(lambda *_: _call(rollback_all)))
    return made


@final
@attrs.define(eq=False)
class SpeculativeThread(SpeculativeStep):
    """Steps buckets on the host in a thread.

    Invariants: a bucket with a future belongs to the thread until it is done; `rollback` and `join` wait.  While the
    thread works, only the master that it steps has a gradient.
    """

    buckets: Sequence[SteppedBucket]  # by index
    optimizer: torch.optim.Optimizer
    scaled: Any  # the optimizer, or an adapter: `step()` divides gradients by `grad_scale`
    expected_divisor: Callable[[], Tensor | None]
    mover: Mover
    is_open: bool = False
    divisor: Tensor | None = None  # the assumed one, on the host; valid after the mark of any gradient
    scratch: Tensor | None = None  # copy of a gradient, for an optimizer that may write into it
    options: list[dict[str, Any]] = attrs.field(factory=list)  # of the parameter groups, when `divisor` was assumed
    futures: dict[int, Future[None]] = attrs.field(factory=dict)
    undos: dict[int, _Undo] = attrs.field(factory=dict)  # kept over steps
    num_confirmed: int = 0
    num_rolled_back: int = 0
    hooks: list[RemovableHandle] = attrs.field(factory=list)  # of the optimizer's state dicts
    thread: ThreadPoolExecutor = attrs.field(factory=lambda: ThreadPoolExecutor(1, "zpartition-speculate"))

    @property
    def num_bytes(self) -> int:  # type: ignore[override]
        own = 0 if self.scratch is None else self.scratch.nbytes
        return own + sum(undo.num_bytes for undo in list(self.undos.values()))

    def begin(self) -> None:
        self.rollback_all()  # of an earlier backward that was not the last
        for bucket in self.buckets:
            bucket.master.grad = None  # `finish_gradients` sets it when all gradients are complete
        divisor = self.expected_divisor()
        self.divisor = None if divisor is None else self._on_host(divisor.detach())
        self.options = _options(self.optimizer)
        self.is_open = True

    def _on_host(self, divisor: Tensor) -> Tensor:
        """Return a copy on the host, which the thread can read without synchronizing with the device."""
        if divisor.is_cpu:
            return divisor.clone()
        host = self.mover.empty(divisor.numel(), divisor.dtype).view(divisor.shape)
        self.mover.fetch(host, divisor, 1.0)
        return host

    def gradient_ready(self, index: int) -> None:
        bucket = self.buckets[index]
        kept = bucket.gradient.kept
        if (
            not self.is_open
            or bucket.placement.tier is not Tier.HOST
            or kept is None
            or kept.dtype != bucket.master.dtype
        ):
            return
        undo = self.undos.setdefault(index, _Undo(torch.empty_like(bucket.master.data)))
        undo.version, undo.is_saved = _compat.version(kept), False
        self.futures[index] = self.thread.submit(self._step, bucket.holder, kept, undo, self.mover.ready())

    def _step(self, holder: Holder, kept: Tensor, undo: _Undo, mark: Any) -> None:
        """Step one bucket, in the thread, when its gradient is on the host."""
        master = holder.tensor
        self.mover.wait_for(mark)
        undo.save(self.optimizer, master)
        master.grad = self._readable(kept)
        before = getattr(self.scaled, "grad_scale", None)
        try:
            if self.divisor is not None:
                self.scaled.grad_scale = self.divisor
            with partial_update(self.optimizer, [holder]):
                self.scaled.step()
        finally:
            if self.divisor is not None:
                self.scaled.grad_scale = before
            master.grad = None

    def _readable(self, kept: Tensor) -> Tensor:
        """Return the gradient, or a copy for an optimizer that may write into it."""
        if getattr(self.optimizer, "keeps_gradients", False):
            return kept
        if self.scratch is None or self.scratch.numel() < kept.numel() or self.scratch.dtype != kept.dtype:
            self.scratch = torch.empty_like(kept)
        copy = self.scratch[: kept.numel()]
        copy.copy_(kept)
        return copy

    def rollback(self, index: int) -> None:
        future = self.futures.get(index)
        if future is None:
            return
        if not future.cancel():
            future.exception()  # waits; a step that failed here fails again in `Partition.apply`
            self.undos[index].restore(self.optimizer, self.buckets[index].master)
            self.num_rolled_back += 1
        del self.futures[index]  # last: after an interrupt of the wait (Ctrl-C) it can be rolled back again

    def join(self) -> None:
        self.is_open = False
        for future in self.futures.values():
            future.exception()

    def rollback_all(self) -> None:
        self.is_open = False
        for index in list(self.futures):
            self.rollback(index)

    def confirm(self, is_plain: bool) -> frozenset[int]:
        self.join()
        if not is_plain or not self._was_right():
            self.rollback_all()
        for index, future in list(self.futures.items()):
            if future.exception() is not None or self._is_touched(index):
                self.rollback(index)
        confirmed = frozenset(self.futures)
        self.futures.clear()
        self.num_confirmed += len(confirmed)
        return confirmed

    def _was_right(self) -> bool:
        found_inf = getattr(self.scaled, "found_inf", None)
        if found_inf is not None and bool(found_inf):
            return False
        is_expected = _value(getattr(self.scaled, "grad_scale", None)) == _value(self.divisor)
        return is_expected and _options(self.optimizer) == self.options

    def _is_touched(self, index: int) -> bool:
        """Return whether the optimizer would get another gradient than the one that was read."""
        bucket = self.buckets[index]
        kept, shown = bucket.gradient.kept, bucket.master.grad
        if kept is None or shown is None or shown.data_ptr() != kept.data_ptr():
            return True
        return _compat.version(kept) != self.undos[index].version

    def close(self) -> None:
        self.rollback_all()
        for hook in self.hooks:
            hook.remove()
        self.thread.shutdown()
        self.undos.clear()
        self.scratch = None


def limit_threads(thread: ThreadPoolExecutor, num_threads: int) -> None:
    """Let torch and its kernels use `num_threads` threads in `thread`.

    torch.set_num_threads acts on the thread that calls it, unless that thread has not asked for its number before,
    and on threads that are started later; for these the number is set back.
    """
    before = torch.get_num_threads()
    try:
        thread.submit(torch.get_num_threads).result()
        thread.submit(torch.set_num_threads, num_threads).result()
    finally:
        torch.set_num_threads(before)


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    """Call a method, unless its object is gone."""
    if (alive := method()) is not None:
        alive()


def _value(divisor: Tensor | None) -> float:
    return 1.0 if divisor is None else float(divisor)


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the hyperparameters of each group, as comparable values."""

    def plain(value: Any) -> Any:
        return value.tolist() if isinstance(value, Tensor) else value

    return [{key: plain(v) for key, v in group.items() if key != "params"} for group in optimizer.param_groups]
