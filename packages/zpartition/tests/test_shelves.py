"""Shelves: weights come to the device when they are wanted, and changes stay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import Parameter

from zpartition.disk import DiskOptions, DiskStore
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
