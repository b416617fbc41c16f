"""Shelves: weights come to the device when they are wanted, and changes stay."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import Parameter

from zpartition.disk import DiskError, DiskOptions, DiskStore
from zpartition.disk.files import BlockFile
from zpartition.homes import IN_PLACE
from zpartition.mover import PlainMover
from zpartition.offload import Tier
from zpartition.shelves import DiskShelf, HostShelf, OnDevice, Shelf


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    made = DiskStore.create(tmp_path / "store", DiskOptions(durable=False))
    yield made
    made.close(remove=True)


@pytest.mark.parametrize("tier", list(Tier))
def test_what_was_put_is_taken_and_what_was_dropped_is_not(tier: Tier, store: DiskStore) -> None:
    span = torch.arange(5000).bfloat16()
    expected = span.clone()
    shelves: dict[Tier, Shelf] = {
        Tier.DEVICE: OnDevice(span),
        Tier.HOST: HostShelf.of(span, PlainMover()),
        Tier.DISK: DiskShelf.of(span, PlainMover(), store),
    }
    shelf = shelves[tier]
    shelf.begin()
    assert torch.equal(shelf.take(), expected)
    assert shelf.take().data_ptr() == shelf.take().data_ptr()
    shelf.take()[7] = 1000.0
    shelf.put()
    expected[7] = 1000.0
    shelf.begin()
    assert torch.equal(shelf.take(), expected)
    shelf.drop()
    shelf.begin()  # what is read ahead and then replaced is read again
    shelf.publish(IN_PLACE, Parameter(torch.full((5000,), 0.5)))
    assert torch.equal(shelf.take(), torch.full((5000,), 0.5).bfloat16())
    assert shelf.num_bytes == span.nbytes * (2 if tier is Tier.DISK else 1)
    assert (shelf.take().data_ptr() == span.data_ptr()) == (tier is Tier.DEVICE)


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_drive_that_fails_once_is_told_of_and_the_weights_can_be_read_and_written_again(
    kind: str, store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = DiskShelf.of(torch.zeros(5000), PlainMover(), store)
    assert shelf.take().eq(0).all()
    shelf.drop()

    def fails(self: BlockFile, *args: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(BlockFile, kind, fails)
        if kind == "write":
            shelf.publish(IN_PLACE, Parameter(torch.ones(5000)))
        with pytest.raises(DiskError, match=os.strerror(errno.EIO)):
            shelf.take()
        shelf.begin()
        assert shelf.reading is not None
        shelf.reading[1].over.wait()
    if kind == "read":
        with pytest.raises(DiskError):  # what was read ahead
            shelf.take()
        assert shelf.take().eq(0).all()
        shelf.drop()
    shelf.publish(IN_PLACE, Parameter(torch.full((5000,), 2.0)))
    assert shelf.take().eq(2).all()
