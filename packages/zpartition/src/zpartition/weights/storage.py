"""Flat parameter storage: the module's parameters become views of one buffer per bucket.

The optimizer updates this rank's span; an in-place all-gather of the spans updates every view, with no copy per
parameter.  In full precision the optimizer updates the span itself; in half precision it updates an fp32 master of
the span, which is cast into the buffer afterwards.
"""

from __future__ import annotations

from typing import final

import attrs
import torch
from torch.nn import Parameter

from zpartition.layout.layout import Bucket, Piece
from zpartition.layout.policy import ZeroPolicy
from zpartition.memory.placement import ON_DEVICE, MasterPlacement, refresh_changed, same_bits


@final
@attrs.define(eq=False)
class BucketStorage:
    """Weights of one bucket on one rank.

    Invariant: between `publish` and the next optimizer step, `flat[span] == master.to(flat.dtype)`.
    """

    bucket: Bucket
    params: tuple[Parameter, ...]  # in slot order; their `.data` are views of `flat`
    span: tuple[int, int]  # of this rank
    flat: torch.Tensor  # (bucket.numel,) parameter dtype, all ranks' spans
    master: Parameter  # (span numel,) master dtype: a view of `flat`, or memory of its own
    placement: MasterPlacement = ON_DEVICE  # of master and states

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
    def shares_master(self) -> bool:
        """True if the optimizer updates the module's own memory."""
        return self.master.data_ptr() == self.own_span.data_ptr()

    def refresh_master(self) -> None:
        """Copy the module's weights into the master (after a broadcast or an edit)."""
        self.placement.refresh(self.master, self.own_span)

    def adopt_edits(self) -> None:
        """Copy edited weights into the master; unchanged elements keep the precision of the master."""
        if not self.shares_master:
            shown = self.placement.values(self.master).to(self.flat.dtype).to(self.flat.device)
            refresh_changed(self.placement, self.master, self.own_span, same_bits(self.own_span, shown))

    def publish(self) -> None:
        """Cast the master into this rank's span of the module's weights."""
        self.placement.publish(self.master, self.own_span)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """Return the parameters' parts inside `master`."""
        return tuple(self.bucket.pieces(rank))

    def moved(self) -> str:
        """Return the name of the first parameter that no longer is a view of the buffer; "" if all are."""
        address, itemsize = self.flat.data_ptr(), self.flat.element_size()
        for slot, param in zip(self.bucket.slots, self.params):
            if slot.numel and param.data_ptr() != address + slot.offset * itemsize:
                return slot.name
        return ""

    @property
    def persistent_bytes(self) -> int:
        """Bytes of the weights between steps."""
        return self.flat.nbytes

    def close(self) -> None:
        """Give every parameter its own memory."""
        for param in self.params:
            param.data = param.data.clone()
            param.grad = None
