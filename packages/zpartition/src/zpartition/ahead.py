"""Updating ahead of the verdict: the optimizer steps a bucket as soon as its gradient is complete.

Problem.  With states on the host, the update begins when backward ends, and the device waits.  But what the update
needs besides the gradient is nearly always known: gradients are finite, and mostly not clipped.

Design (SuperOffload, Lian et al. 2025).  In the last backward of a step a thread updates each bucket on the host that
has settled, with the divisor that is expected (the loss scale alone), keeping what was there before.  `confirm`, when
the verdict is there, compares what was assumed with what is true: the divisor, the options of the parameter groups,
and that nobody has touched the gradients in between.  What was assumed rightly is published; everything else is put
back bit for bit and stepped in the ordinary way.  A step that is left out never asks, and `retract` puts all back.

It costs a copy of the host's masters and states ("rollback" in the ledger), and reading and writing it; and, for an
optimizer that may write into gradients (torch's fused ones leave them divided), a copy of one bucket's at a time:
what is inspected afterwards, and perhaps stepped again, is what was reduced.

Rejected.  Computing the old values from the new ones (not exact); two sets of states used in turn (optimizers update
in place); speculation on disk, where `discard` would do, but every wrong guess writes everything twice.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, cast, final

import attrs
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from zpartition import _compat
from zpartition.apart import in_parts
from zpartition.counts import is_large
from zpartition.homes import Home, OnHost
from zpartition.mover import Mover
from zpartition.offload import Tier
from zpartition.shapes import takes_cuts
from zpartition.state import Holder

if TYPE_CHECKING:
    from zpartition.gradient import BucketGradient

__all__ = ["NEVER", "Ahead", "Bucket", "running"]


@attrs.frozen(eq=False)
class Bucket:
    """What of one bucket is needed here."""

    holder: Holder
    gradient: BucketGradient

    @property
    def master(self) -> Parameter:
        return self.holder.tensor

    @property
    def home(self) -> Home:
        return cast(Home, self.holder.home)


class Ahead:
    """The identity: nothing runs ahead."""

    num_bytes = 0  # of what is kept to be put back
    num_confirmed = 0  # buckets whose update was as assumed, ever
    num_retracted = 0  # and those that were put back

    def begin(self) -> None:
        """The last backward of a step begins: what settles may be stepped."""

    def settled(self, index: int) -> None:
        """The gradient of a bucket is complete, as far as one can know."""

    def retract(self, index: int) -> None:
        """It was not, or is not going to be used: nobody works on the bucket any more, and it is as before."""

    def join(self) -> None:
        """Nobody works on anything any more."""

    def retract_all(self) -> None:
        """Everything is as before."""

    def confirm(self, is_plain: bool) -> frozenset[int]:
        """Buckets that need no step any more; all others are as before.  `is_plain`: the step treats all alike."""
        return frozenset()

    def close(self) -> None:
        """Put everything back and end the thread."""


NEVER = Ahead()


@attrs.define(eq=False)
class _Undo:
    """What a bucket was before its update; the memory is used again in the next step."""

    master: Tensor  # (span numel,)
    copies: dict[str, Tensor] = attrs.field(factory=dict)  # by state key
    entry: dict[str, Any] | None = None  # the optimizer's own, None: it had none
    version: int = 0  # of the gradient that was read
    is_saved: bool = False  # whether there is anything to be put back

    def save(self, optimizer: torch.optim.Optimizer, master: Parameter) -> None:
        """Before the update."""
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
        """Put back what the last `save` saw, into the same tensors."""
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
        """Of the copies."""
        return self.master.nbytes + sum(value.nbytes for key, value in self.copies.items() if is_large(key, value))


def running(
    buckets: Sequence[Bucket],
    optimizer: torch.optim.Optimizer,
    scaled: Any,
    assume: Callable[[], Tensor | None],
    mover: Mover,
) -> Ahead:
    """A thread that steps `buckets`, hooked into their gradients; none where the optimizer looks at whole tensors."""
    if takes_cuts(optimizer):  # it speaks to the other ranks in its step, which is not for a thread
        name = type(optimizer).__name__
        warnings.warn(f"speculation has no effect: {name} looks at whole tensors, over all ranks", stacklevel=3)
        return NEVER
    made = Running(buckets, optimizer, scaled, assume, mover)
    for index, bucket in enumerate(buckets):
        bucket.gradient.ahead = made
        if isinstance(bucket.home, OnHost):
            bucket.home.ahead = functools.partial(made.retract, index)
    retract_all = weakref.WeakMethod(made.retract_all)  # the optimizer may outlive the partition
    made.hooks.append(optimizer.register_state_dict_pre_hook(lambda _: _call(retract_all)))
    made.hooks.append(optimizer.register_load_state_dict_pre_hook(lambda *_: _call(retract_all)))
    return made


@final
@attrs.define(eq=False)
class Running(Ahead):
    """Steps buckets on the host in a thread of its own.

    Invariants: a bucket whose future exists belongs to the thread until it is done; `retract` and `join` wait.  While
    the thread works no master has a gradient but the one that it steps.
    """

    buckets: Sequence[Bucket]  # by index
    optimizer: torch.optim.Optimizer
    scaled: Any  # the optimizer, or an adapter: `step()` divides gradients by `grad_scale`
    assume: Callable[[], Tensor | None]  # the divisor that is expected
    mover: Mover
    is_open: bool = False
    divisor: Tensor | None = None  # that was assumed, on the host: valid behind the mark of any gradient
    scratch: Tensor | None = None  # what the thread steps with where an optimizer may write into gradients
    options: list[dict[str, Any]] = attrs.field(factory=list)  # of the parameter groups, when it was
    futures: dict[int, Future[None]] = attrs.field(factory=dict)
    undos: dict[int, _Undo] = attrs.field(factory=dict)  # kept over steps
    num_confirmed: int = 0
    num_retracted: int = 0
    hooks: list[RemovableHandle] = attrs.field(factory=list)  # of the optimizer's state dicts
    thread: ThreadPoolExecutor = attrs.field(factory=lambda: ThreadPoolExecutor(1, "zpartition-ahead"))

    @property
    def num_bytes(self) -> int:  # type: ignore[override]
        own = 0 if self.scratch is None else self.scratch.nbytes
        return own + sum(undo.num_bytes for undo in list(self.undos.values()))

    def begin(self) -> None:
        self.retract_all()  # of an earlier backward that was not the last
        for bucket in self.buckets:
            bucket.master.grad = None  # `finish_gradients` shows what there is, when all of it is there
        divisor = self.assume()
        self.divisor = None if divisor is None else self._on_host(divisor.detach())
        self.options = _options(self.optimizer)
        self.is_open = True

    def _on_host(self, divisor: Tensor) -> Tensor:
        """A copy that the thread can read without a word to the device, whose streams it does not know."""
        if divisor.is_cpu:
            return divisor.clone()
        host = self.mover.empty(divisor.numel(), divisor.dtype).view(divisor.shape)
        self.mover.fetch(host, divisor, 1.0)
        return host

    def settled(self, index: int) -> None:
        bucket = self.buckets[index]
        kept = bucket.gradient.kept
        if not self.is_open or bucket.home.tier is not Tier.HOST or kept is None or kept.dtype != bucket.master.dtype:
            return
        undo = self.undos.setdefault(index, _Undo(torch.empty_like(bucket.master.data)))
        undo.version, undo.is_saved = _compat.version(kept), False
        self.futures[index] = self.thread.submit(self._step, bucket.holder, kept, undo, self.mover.ready())

    def _step(self, holder: Holder, kept: Tensor, undo: _Undo, mark: Any) -> None:
        """In the thread: one bucket, when its gradient has come to the host."""
        master = holder.tensor
        self.mover.wait_for(mark)
        undo.save(self.optimizer, master)
        master.grad = self._readable(kept)
        before = getattr(self.scaled, "grad_scale", None)
        try:
            if self.divisor is not None:
                self.scaled.grad_scale = self.divisor
            with in_parts(self.optimizer, [holder]):
                self.scaled.step()
        finally:
            if self.divisor is not None:
                self.scaled.grad_scale = before
            master.grad = None

    def _readable(self, kept: Tensor) -> Tensor:
        """The gradient for an optimizer that reads it; a copy for one that may write into it."""
        if getattr(self.optimizer, "keeps_gradients", False):
            return kept
        if self.scratch is None or self.scratch.numel() < kept.numel() or self.scratch.dtype != kept.dtype:
            self.scratch = torch.empty_like(kept)
        copy = self.scratch[: kept.numel()]
        copy.copy_(kept)
        return copy

    def retract(self, index: int) -> None:
        future = self.futures.get(index)
        if future is None:
            return
        if not future.cancel():
            future.exception()  # waits; a step that failed here fails again where it is asked for
            self.undos[index].restore(self.optimizer, self.buckets[index].master)
            self.num_retracted += 1
        del self.futures[index]  # last: whoever interrupts the wait (Ctrl-C) leaves what can be retracted again

    def join(self) -> None:
        self.is_open = False
        for future in self.futures.values():
            future.exception()

    def retract_all(self) -> None:
        self.is_open = False
        for index in list(self.futures):
            self.retract(index)

    def confirm(self, is_plain: bool) -> frozenset[int]:
        self.join()
        if not is_plain or not self._was_right():
            self.retract_all()
        for index, future in list(self.futures.items()):
            if future.exception() is not None or self._is_touched(index):
                self.retract(index)
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
        """Whether the optimizer would be given another gradient than the one that was read."""
        bucket = self.buckets[index]
        kept, shown = bucket.gradient.kept, bucket.master.grad
        if kept is None or shown is None or shown.data_ptr() != kept.data_ptr():
            return True
        return _compat.version(kept) != self.undos[index].version

    def close(self) -> None:
        self.retract_all()
        for hook in self.hooks:
            hook.remove()
        self.thread.shutdown()
        self.undos.clear()
        self.scratch = None


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    """Unless its object is gone."""
    if (alive := method()) is not None:
        alive()


def _value(divisor: Tensor | None) -> float:
    return 1.0 if divisor is None else float(divisor)


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The hyperparameters of each group, as values that can be compared."""

    def plain(value: Any) -> Any:
        return value.tolist() if isinstance(value, Tensor) else value

    return [{key: plain(v) for key, v in group.items() if key != "params"} for group in optimizer.param_groups]
