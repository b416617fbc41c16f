"""Stored tensors are restored, and slots of an arena are reused."""

from __future__ import annotations

import gc
import logging

import pytest
import torch

from zpartition.activations import ArenaStore, DeviceStore, HostStore


@pytest.mark.parametrize("store", [DeviceStore(), HostStore(), ArenaStore(2), ArenaStore(2, on_host=True)])
def test_stored_tensors_are_restored(store) -> None:
    first, second = torch.arange(4.0), torch.arange(4.0) + 10
    backs = [store.put(first.clone()), store.put(second.clone())]
    assert torch.equal(backs[0](), first)
    assert torch.equal(backs[1](), second)
    assert torch.equal(backs[1](), second)


def test_an_arena_is_one_buffer_per_size_and_reuses_slots(caplog) -> None:
    arena = ArenaStore(2)
    backs = [arena.put(torch.full((3,), float(index))) for index in range(2)]
    (slots,) = arena.free.values()
    assert not slots
    with caplog.at_level(logging.WARNING, "zpartition"):
        more = [arena.put(torch.full((3,), 5.0)), arena.put(torch.full((3,), 6.0))]
    assert [record.getMessage()[:45] for record in caplog.records] == [
        "more than 2 activations of 3 elements are sav"
    ]
    assert more[1]().tolist() == [6.0] * 3
    kept = backs[0]()
    del backs
    gc.collect()
    assert len(slots) == 2
    assert slots[0].untyped_storage().data_ptr() == slots[1].untyped_storage().data_ptr()
    arena.put(torch.full((3,), 7.0))
    assert kept.tolist() == [0.0] * 3
    arena.put(torch.ones(3, dtype=torch.float64))
    assert len(arena.free) == 2
