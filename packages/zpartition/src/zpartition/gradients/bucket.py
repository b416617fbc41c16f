"""Gradient of one bucket, from autograd to the optimizer; and the non-finite probe.

Autograd delivers a parameter's gradient once per backward.  The first one of a step is copied into the bucket's flat
`local` buffer, and `param.grad` becomes a view of it, so that further micro-steps accumulate in place without any
work here.  Buffers are not zeroed beforehand, because the first gradient is copied.  If the copy also divides by the
number of ranks, or converts half precision to fp32, `.grad` is dropped at once, so that later gradients are delivered
again and a second gradient of the model's size never exists.

The non-finite probe names the rank and the parameter of a NaN.  It inspects gradients before they are reduced,
because after the reduction a NaN of one rank is on all ranks.  It reads every gradient once more and synchronizes
with the device, so it is off until a NaN was seen, and off again some finite steps later.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Sequence
from typing import final

import attrs
import torch
from torch.nn import Parameter

from zpartition._compat import version
from zpartition.gradients.placeholder import GradPlaceholder, HiddenGradientError
from zpartition.gradients.sparse import SparseRows, add_rows
from zpartition.gradients.speculate import NO_SPECULATION, SpeculativeStep
from zpartition.layout.layout import Bucket
from zpartition.memory.buffers import BufferPool
from zpartition.memory.mover import Mover

PROBED_STEPS = 100  # that the probe inspects after a non-finite one
_UNHELD = max(map(sys.getrefcount, [object()]))  # references to an element of a list, as counted while mapping


class BucketPhase(enum.Enum):
    """State of a bucket's local buffer, and its memory cost."""

    IDLE = "idle"  # no local buffer: costs nothing beyond `kept`
    FILLING = "filling"  # a buffer of bucket.numel; hooks write into it
    IN_FLIGHT = "in flight"  # the same buffer, owned by a collective until it is reduced
    REDUCED = "reduced"  # no local buffer; a gradient arriving now is late (used again in this backward)


class Round(enum.Enum):
    """Treatment of the gradients of the running backward."""

    NONE = "none"  # no backward is running
    LOCAL = "local"  # accumulates on this rank: costs a full local gradient until a SENDING round
    SENDING = "sending"  # every bucket is sent once, in an order that all ranks share


@final
@attrs.define(eq=False)
class BucketGradient:
    """Local contributions and the reduced accumulator of one bucket.

    Invariants: `local is None` exactly in IDLE and REDUCED; `filled` is a subset of `seen`.
    """

    bucket: Bucket
    params: tuple[Parameter, ...]  # in slot order
    local_dtype: torch.dtype
    pool: BufferPool
    factor: float = 1.0  # multiplied while a gradient is copied into `local`
    phase: BucketPhase = BucketPhase.IDLE
    local: torch.Tensor | None = None  # pool buffer of at least bucket.numel elements
    kept: torch.Tensor | None = None  # reduced sum so far, accumulate dtype; None: nothing reduced yet
    unreduced_whole: torch.Tensor | None = None  # this rank's own whole gradient, if it is not reduced
    borrowed: torch.Tensor | None = None  # the pool buffer that `kept` is, to be released; None: it is `store`
    store: torch.Tensor | None = None  # this bucket's own accumulator, allocated on first use and reused
    rows: SparseRows | None = None  # of a sparse bucket, instead of `local`
    speculative_step: SpeculativeStep = NO_SPECULATION  # may update the bucket when its gradient is complete
    mover: Mover | None = None  # moves reduced gradients to the host; None: they stay on the device
    filled: set[int] = attrs.field(factory=set)  # slots whose part of `local` holds a gradient
    awaiting: set[int] = attrs.field(factory=set)  # slots without a gradient in this round
    late: set[int] = attrs.field(factory=set)  # slots whose gradient arrived after the bucket was sent
    late_grads: dict[int, torch.Tensor] = attrs.field(factory=dict)  # by slot: late gradients of earlier rounds
    seen: set[int] = attrs.field(factory=set)  # slots with any gradient since the last `reset`
    plain: dict[int, tuple[int, int]] = attrs.field(factory=dict)  # by slot: (address, version) of plain gradients
    placeholders: dict[int, GradPlaceholder] = attrs.field(factory=dict)  # shown as `.grad`, by slot
    _views: dict[int, list[torch.Tensor]] = attrs.field(factory=dict)  # per buffer address, in slot order

    def open_round(self) -> None:
        """Begin a backward: one gradient is awaited for every trainable parameter."""
        slots = self.bucket.slots
        self.awaiting = {
            index for index, p in enumerate(self.params) if p.requires_grad and not slots[index].is_elsewhere
        }
        self._remove_placeholders()
        if self.phase is BucketPhase.FILLING:
            return  # `.grad` shows `local`, and autograd adds to it
        self.phase = BucketPhase.IDLE
        if self.kept is not None:
            self.detach_grads()  # they may show `kept`, which autograd must not add to

    def arrive(self, index: int) -> bool:
        """Copy `params[index].grad` into the local buffer; returns True if the bucket is complete."""
        param = self.params[index]
        grad = param.grad
        assert grad is not None
        if self.rows is not None:
            self.rows.add(grad.detach())
            param.grad = None
        elif grad is not (view := self.views_of(self._local())[index]):
            self._copy_into(view, index, param, grad)
        self.filled.add(index)
        self.seen.add(index)
        self.awaiting.discard(index)
        return not self.awaiting

    def arrive_late(self) -> None:
        """Copy all late gradients into the local buffer."""
        self._keep_late()
        for index, grad in self.late_grads.items():
            self.params[index].grad = grad
            self.arrive(index)
        self.late_grads.clear()

    def _keep_late(self) -> None:
        """Move late gradients of this round out of the parameters."""
        for index in sorted(self.late):
            grad, self.params[index].grad = self.params[index].grad, None
            assert grad is not None
            before = self.late_grads.get(index)
            self.late_grads[index] = grad if before is None else before + grad
        self.late.clear()

    def _copy_into(self, view: torch.Tensor, index: int, param: Parameter, grad: torch.Tensor) -> None:
        grad = grad.detach() if grad.layout is torch.strided else grad.detach().to_dense()
        if grad.dtype == view.dtype and self.factor == 1.0:
            view.copy_(grad)  # the first of the step, or (create_graph) a new total that holds the old one
            param.grad = view
            return
        if index in self.filled:
            view.add_(grad, alpha=self.factor)
        elif self.factor == 1.0:
            view.copy_(grad)
        else:
            torch.mul(grad, self.factor, out=view)
        param.grad = None

    def seal(self) -> torch.Tensor:
        """Return the local buffer for sending, (bucket.numel,), with zeros for missing gradients."""
        local = self._local()
        views = self.views_of(local)
        for index in range(len(views)):
            if index not in self.filled:
                views[index].zero_()
        self.detach_grads()
        self.phase = BucketPhase.IN_FLIGHT
        return local[: self.bucket.numel]

    def keep(self, received: torch.Tensor, factor: float, dtype: torch.dtype) -> None:
        """Add `factor` x `received` (whole bucket or this rank's span) to the accumulator of `dtype`."""
        self.speculative_step.rollback(self.bucket.index)
        if self.mover is not None:
            self._keep_on_host(self.mover, received, factor, dtype)
        elif self.kept is not None:
            self.kept.add_(received, alpha=factor)
        else:
            is_whole = received.numel() == self.bucket.numel and received.data_ptr() == self.local_pointer
            if is_whole and received.dtype == dtype:
                self.kept, self.borrowed, self.local = received, self.local, None
            else:
                self.kept = self.accumulator(received.numel(), dtype)
                if self.kept.data_ptr() != received.data_ptr():
                    self.kept.copy_(received)
            if factor != 1.0:
                self.kept.mul_(factor)
        if self.local is not None:
            self.pool.release(self.local)
            self.local = None
        self.filled.clear()
        self.phase = BucketPhase.REDUCED
        self.speculative_step.gradient_ready(self.bucket.index)

    def keep_unreduced(self, local: torch.Tensor, span: tuple[int, int], dtype: torch.dtype) -> None:
        """Add the sealed `local` to this rank's own gradient, of which `kept` shows the elements `span`."""
        if self.unreduced_whole is not None:
            self.unreduced_whole.add_(local)
        elif local.dtype == dtype:
            self.unreduced_whole, self.borrowed, self.local = local, self.local, None
        else:
            self.unreduced_whole = local.to(dtype)
        self.kept = self.unreduced_whole[slice(*span)]
        if self.local is not None:
            self.pool.release(self.local)
            self.local = None
        self.filled.clear()
        self.phase = BucketPhase.REDUCED

    def _keep_on_host(self, mover: Mover, received: torch.Tensor, factor: float, dtype: torch.dtype) -> None:
        store = self.accumulator(received.numel(), dtype)
        if self.kept is None:
            mover.fetch(store, received, factor)
        else:
            mover.add(store, received, factor)
        self.kept = store

    def keep_rows(self, parts: Sequence[tuple[torch.Tensor, torch.Tensor]], rank: int, *, factor: float) -> None:
        """Add `factor` x every rank's rows to the accumulator of this rank's span, in float32 or wider."""
        assert self.rows is not None
        self.speculative_step.rollback(self.bucket.index)
        span = self.bucket.span(rank)
        if self.kept is None:
            self.kept = self.accumulator(span[1] - span[0], torch.promote_types(self.local_dtype, torch.float32))
            self.kept.zero_()
        end = self.bucket.slots[0].end
        add_rows(
            self.kept[: max(0, min(span[1], end) - span[0])],
            (span[0], max(span[0], min(span[1], end))),
            [(indices.to(self.kept.device), values.to(self.kept.device)) for indices, values in parts],
            factor,
        )
        self.rows.clear()
        self.filled.clear()
        self.phase = BucketPhase.REDUCED
        self.speculative_step.gradient_ready(self.bucket.index)

    def accumulator(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return this bucket's own accumulator, allocated once; contents undefined."""
        if self.store is None:
            mover = self.mover
            self.store = (
                torch.empty(numel, dtype=dtype, device=self.pool.device)
                if mover is None
                else mover.empty(numel, dtype)
            )
        return self.store

    def close_round(self, *, is_scaled: bool) -> None:
        """End a backward: `.grad` of parameters with a gradient shows it, or is a placeholder.

        is_scaled: gradients include a factor that is internal to the step.
        """
        self._keep_late()
        reason = "multiplied by the loss scale or by loss weights" if is_scaled else self._hidden_reason()
        if self.phase is not BucketPhase.FILLING and not reason:
            self.attach_grads()
            return
        for index in self.seen:
            if self.params[index].grad is None:
                placeholder = self.placeholders.get(index)
                if placeholder is None or placeholder.reason != reason:
                    slot = self.bucket.slots[index]
                    placeholder = GradPlaceholder(self.params[index], slot.name, reason)
                    self.placeholders[index] = placeholder
                self.params[index].grad = placeholder

    def _hidden_reason(self) -> str:
        """Return the reason why `.grad` cannot show the reduced gradient; "" if it can."""
        if self.rows is not None and (self.kept is None or self.filled or self.kept.numel() != self.bucket.numel):
            return "stored as sparse rows"
        if self.mover is not None:
            return "on the host"
        if self.kept is None or self.kept.numel() != self.bucket.numel:
            return f"sharded over {self.bucket.num_shards} ranks"
        dtypes = {self.params[index].dtype for index in self.seen} - {self.kept.dtype}
        return f"accumulated in {self.kept.dtype}" if dtypes else ""

    def _remove_placeholders(self) -> None:
        for index, placeholder in self.placeholders.items():
            if self.params[index].grad is placeholder:
                self.params[index].grad = None

    def attach_grads(self, unused: frozenset[str] | None = None, sparse: frozenset[int] = frozenset()) -> None:
        """Let `param.grad` show the kept (whole) gradient: of the parameters seen here, or of all but `unused`.

        sparse: ids of the parameters whose `.grad` becomes a sparse copy instead.
        """
        if self.kept is None or self.kept.numel() != self.bucket.numel or self.mover is not None:
            return
        self._remove_placeholders()
        views = self.views_of(self.kept)
        for index, slot in enumerate(self.bucket.slots):
            shown = index in self.seen if unused is None else slot.name not in unused
            if shown and self.params[index].dtype == self.kept.dtype:
                is_sparse = id(self.params[index]) in sparse
                self.params[index].grad = views[index].to_sparse(1) if is_sparse else views[index]

    def shows_kept(self, index: int) -> bool:
        """Return whether `params[index].grad` shows the reduced gradient, or a placeholder for it."""
        grad = self.params[index].grad
        if grad is None or grad is self.placeholders.get(index):
            return grad is not None
        return (
            self.kept is not None
            and self.kept.numel() == self.bucket.numel
            and grad is self.views_of(self.kept)[index]
        )

    def has_plain(self, index: int) -> bool:
        """Return whether `params[index].grad` is a plain gradient: from a backward outside any round."""
        grad = self.params[index].grad
        return grad is not None and index not in self.filled and not self.shows_kept(index)

    def unreduced(self, index: int) -> torch.Tensor | None:
        """Return the unreduced gradient of `params[index]`, multiplied by `factor`; None if there is none."""
        if self.rows is not None:
            return self.rows.dense(self.params[index]) if index in self.filled else None
        if index in self.filled:
            return self.views_of(self._local())[index]
        grad = self.params[index].grad
        return grad.detach() * self.factor if grad is not None and self.has_plain(index) else None

    def record_plain(self, index: int) -> None:
        """Record the plain gradient of `params[index]`, which is local to this rank, for `check_unedited`."""
        grad = self.params[index].grad
        assert grad is not None
        self.plain[index] = (grad.data_ptr(), version(grad)) if grad.layout is torch.strided else (0, 0)

    def check_unedited(self, index: int) -> None:
        """Raise HiddenGradientError if a plain gradient was changed since, e.g. clipped by the norm of one rank."""
        grad = self.params[index].grad
        recorded = self.plain.get(index)
        if grad is None or recorded is None or recorded in ((0, 0), (grad.data_ptr(), version(grad))):
            return
        raise HiddenGradientError(
            f"the gradient of {self.bucket.slots[index].name} was changed between loss.backward() and the step, "
            "where it is local to this rank; the step uses the mean over ranks. To clip, set "
            '"gradient_clipping" in the config; to change gradients otherwise, call engine.backward(loss) and use '
            "safe_set_full_grad"
        )

    def take_plain(self, index: int) -> torch.Tensor:
        """Return the plain gradient of `params[index]`, and set `.grad` to None.  Raises as `check_unedited`."""
        self.check_unedited(index)
        grad, self.params[index].grad = self.params[index].grad, None
        assert grad is not None
        return grad

    def drop_plain(self) -> None:
        """Drop plain gradients."""
        for index, param in enumerate(self.params):
            if self.has_plain(index):
                param.grad = None

    def detach_grads(self) -> None:
        """Set `.grad` of all parameters to None, so that autograd starts anew."""
        for param in self.params:
            param.grad = None

    def reset(self) -> None:
        """Drop every gradient, reduced or not; buffers return to the pool."""
        self.speculative_step.rollback(self.bucket.index)
        self.detach_grads()  # first: `.grad` itself is a reference
        for shown in (self.local, self.kept):
            if shown is not None:
                self._leave_held_views(shown)
        for buffer in (self.local, self.borrowed):
            if buffer is not None:
                self.pool.release(buffer)
        self.local = self.borrowed = self.kept = self.unreduced_whole = None
        if self.rows is not None:
            self.rows.clear()
        for slots in (self.filled, self.seen, self.late, self.awaiting):
            slots.clear()
        self.late_grads.clear()
        self.plain.clear()
        self.phase = BucketPhase.IDLE

    def _leave_held_views(self, buffer: torch.Tensor) -> None:
        """Give gradients in `buffer` that user code still refers to (`g = param.grad`) memory of their own."""
        views = self._views.get(buffer.data_ptr(), [])
        counts = list(map(sys.getrefcount, views))
        if not views or max(counts) == _UNHELD:
            return
        for index, (slot, count) in enumerate(zip(self.bucket.slots, counts)):
            if count > _UNHELD:
                views[index].data = views[index].clone()
                views[index] = buffer[slot.offset : slot.end].view(slot.shape)

    def forget_views(self) -> None:
        """Drop cached views of buffers that are not in use, which may be freed."""
        kept = {buffer.data_ptr() for buffer in (self.local, self.borrowed) if buffer is not None}
        self._views = {address: views for address, views in self._views.items() if address in kept}

    def views_of(self, buffer: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the views of `buffer` as parameters, in slot order; the same objects each time."""
        views = self._views.get(buffer.data_ptr())
        if views is None:
            views = [buffer[slot.offset : slot.end].view(slot.shape) for slot in self.bucket.slots]
            self._views[buffer.data_ptr()] = views
        return views

    @property
    def local_pointer(self) -> int:
        """Address of the local buffer, 0 without one."""
        return 0 if self.local is None else self.local.data_ptr()

    def adopt(self, buffer: torch.Tensor) -> None:
        """Start to fill `buffer`, a pool buffer that may hold old values of another bucket."""
        assert self.local is None
        self.local = buffer
        for lo, hi in self.bucket.gaps():
            buffer[lo:hi].zero_()
        self.phase = BucketPhase.FILLING

    def _local(self) -> torch.Tensor:
        assert self.local is not None, f"bucket {self.bucket.index} is {self.phase.value}"
        return self.local


@final
@attrs.define(eq=False)
class NonFiniteProbe:
    """Records the first parameter of this rank whose gradient was infinite or NaN."""

    steps_left: int = 0  # steps to inspect; 0: off
    first_name: str = ""  # its name; "": none in this step

    def begin(self) -> None:
        """Start to inspect gradients, from the next step on."""
        self.steps_left = PROBED_STEPS + 1  # the running step counts

    def step_over(self) -> None:
        """End or restart a step."""
        self.first_name, self.steps_left = "", max(0, self.steps_left - 1)

    def inspect(self, gradient: BucketGradient) -> None:
        """Inspect the sealed local buffer of a bucket, if the probe is on; synchronizes with the device."""
        if not self.steps_left or self.first_name or gradient.local is None:
            return
        if bool(torch.isfinite(gradient.local[: gradient.bucket.numel]).all()):
            return
        for slot, view in zip(gradient.bucket.slots, gradient.views_of(gradient.local)):
            if not bool(torch.isfinite(view).all()):
                self.first_name = slot.name
                return
