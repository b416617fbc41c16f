"""Where the weights of one unit's bucket rest at stage 3, between the gathers that read them.

`own_span` of a `ShardedStorage` is what the ranks gather from, and it has to be on the device for that.  A shelf
brings it there (`take`) and lets it go (`drop`, or `put` when it was changed).  The identity keeps it there.  Reading
from disk can begin before it is needed: the residence knows which unit comes next.

Files hold the weights once, in the slot that is written first: nobody asks for an older generation of them, because
the masters, which do have one, make them anew.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Protocol, final

import attrs
import torch
from torch import Tensor
from torch.nn import Parameter

from zpartition.disk import DiskError, DiskStore, Region, Transfer
from zpartition.homes import Home
from zpartition.mover import Mover
from zpartition.offload import Tier

__all__ = ["DiskShelf", "HostShelf", "OnDevice", "Shelf"]


class Shelf(Protocol):
    """The place of (span numel,) weights."""

    @property
    def tier(self) -> Tier: ...

    @property
    def num_bytes(self) -> int:
        """Where `tier` says."""

    def begin(self) -> None:
        """They will be wanted soon."""

    def take(self) -> Tensor:
        """(span numel,) on the device; the same memory until `drop` or `put`."""

    def drop(self) -> None:
        """They were read and are not needed on the device."""

    def put(self) -> None:
        """What is on the device is what counts now."""

    def publish(self, home: Home, master: Parameter) -> None:
        """Start weights = master, cast."""


@final
@attrs.frozen(eq=False)
class OnDevice:
    """The identity."""

    span: Tensor
    tier = Tier.DEVICE

    @property
    def num_bytes(self) -> int:
        return self.span.nbytes

    def begin(self) -> None: ...

    def take(self) -> Tensor:
        return self.span

    def drop(self) -> None: ...

    def put(self) -> None: ...

    def publish(self, home: Home, master: Parameter) -> None:
        home.publish(master, self.span)


@final
@attrs.define(eq=False)
class HostShelf:
    """In CPU memory."""

    mover: Mover
    device: torch.device
    host: Tensor  # (span numel,)
    shown: Tensor | None = None  # the copy on the device
    tier = Tier.HOST

    @classmethod
    def of(cls, span: Tensor, mover: Mover) -> HostShelf:
        """Take over (span numel,) weights on the device."""
        host = mover.empty(span.numel(), span.dtype)
        host.copy_(span)
        return cls(mover, span.device, host)

    @property
    def num_bytes(self) -> int:
        return self.host.nbytes

    def begin(self) -> None: ...

    def take(self) -> Tensor:
        if self.shown is None:
            self.shown = torch.empty_like(self.host, device=self.device)
            self.mover.send(self.shown, self.host)
            self.mover.wait_device()
        return self.shown

    def drop(self) -> None:
        self.shown = None

    def put(self) -> None:
        if self.shown is not None:
            self.host.copy_(self.shown)
            self.shown = None

    def publish(self, home: Home, master: Parameter) -> None:
        self.host.copy_(home.values(master))


_numbers = itertools.count()  # of regions: names in a store


@final
@attrs.define(eq=False)
class DiskShelf:
    """In a file; in CPU memory while it is read or written."""

    store: DiskStore
    mover: Mover
    device: torch.device
    dtype: torch.dtype
    numel: int
    region: Region
    reading: tuple[Tensor, Transfer] | None = None
    writing: Transfer | None = None
    shown: Tensor | None = None  # the copy on the device
    tier = Tier.DISK

    @classmethod
    def of(cls, span: Tensor, mover: Mover, store: DiskStore) -> DiskShelf:
        """Take over (span numel,) weights on the device."""
        region = store.allocate(f"weights {next(_numbers)}", span.nbytes)
        made = cls(store, mover, span.device, span.dtype, span.numel(), region)
        made._write(span)
        return made

    @property
    def num_bytes(self) -> int:
        """A region has two slots."""
        return 2 * self.region.num_bytes

    def begin(self) -> None:
        if self.reading is None and self.shown is None:
            buffer = self.store.buffer(self.region.num_bytes)
            self.reading = (buffer, self.store.read(self.region, buffer))

    def take(self) -> Tensor:
        self.begin()
        if self.shown is None and self.reading is not None:
            (buffer, transfer), self.reading = self.reading, None  # one that fails is read again the next time
            transfer.wait()
            self.shown = torch.empty(self.numel, dtype=self.dtype, device=self.device)
            self.mover.send(self.shown, self._seen(buffer))
            self.mover.wait_device()
        assert self.shown is not None
        return self.shown

    def drop(self) -> None:
        self.shown = None

    def put(self) -> None:
        if self.shown is not None:
            self._write(self.shown)
            self.shown = None

    def publish(self, home: Home, master: Parameter) -> None:
        self._write(home.values(master))

    def _write(self, values: Tensor) -> None:
        """Start to; an error is told when the weights are read.

        What is under way is old: once it is over, whatever has become of it does not matter any more.
        """
        for transfer in (self.writing, self.reading[1] if self.reading is not None else None):
            with contextlib.suppress(DiskError):
                if transfer is not None:
                    transfer.wait()
        self.reading = None
        buffer = self.store.buffer(self.region.num_bytes)
        self._seen(buffer).copy_(values)
        self.writing = self.store.write(self.region, buffer)

    def _seen(self, buffer: Tensor) -> Tensor:
        return buffer[: self.region.num_bytes].view(self.dtype)
