"""Flat parameter storage: the module's parameters become views of one buffer per bucket.

The optimizer updates this rank's span; gathering the spans in place makes every view show the new weights,
with no copy per parameter.  In full precision the span itself is what the optimizer updates; in half precision
it updates an fp32 master of the span, which is cast into the buffer afterwards.
"""

from __future__ import annotations

from typing import final

import attrs
import torch
from torch.nn import Parameter

from zpartition.homes import IN_PLACE, Home, same_bits, take_edits
from zpartition.layout import Bucket, Piece
from zpartition.policy import ZeroPolicy


@final
@attrs.define(eq=False)
class BucketStorage:
    """The weights of one bucket on one rank.

    Invariant: between `publish` and the next optimizer step, `flat[span] == master.to(flat.dtype)`.
    """

    bucket: Bucket
    params: tuple[Parameter, ...]  # in slot order; their `.data` are views of `flat`
    span: tuple[int, int]  # of this rank
    flat: torch.Tensor  # (bucket.numel,) parameter dtype, all ranks' spans
    master: Parameter  # (span numel,) master dtype: a view of `flat`, or memory of its own
    home: Home = IN_PLACE  # of master and states

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
        """Whether the optimizer updates the module's own memory."""
        return self.master.data_ptr() == self.own_span.data_ptr()

    def refresh_master(self) -> None:
        """Take the module's weights as the truth (after a broadcast or an edit)."""
        self.home.refresh(self.master, self.own_span)

    def absorb_edits(self) -> None:
        """`refresh_master`, where what shows the master as it is keeps it."""
        if not self.shares_master:
            shown = self.home.values(self.master).to(self.flat.dtype).to(self.flat.device)
            take_edits(self.home, self.master, self.own_span, same_bits(self.own_span, shown))

    def publish(self) -> None:
        """Cast the master into this rank's span of the module's weights."""
        self.home.publish(self.master, self.own_span)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """The parameters' parts inside `master`."""
        return tuple(self.bucket.pieces(rank))

    def moved(self) -> str:
        """Name of the first parameter that no longer lives in the buffer; "" when all do."""
        address, itemsize = self.flat.data_ptr(), self.flat.element_size()
        for slot, param in zip(self.bucket.slots, self.params):
            if slot.numel and param.data_ptr() != address + slot.offset * itemsize:
                return slot.name
        return ""

    @property
    def resting_bytes(self) -> int:
        """What the weights cost between steps."""
        return self.flat.nbytes

    def close(self) -> None:
        """Give every parameter memory of its own again."""
        for param in self.params:
            param.data = param.data.clone()
            param.grad = None
