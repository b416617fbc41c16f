"""Parameter placements: weights are loaded on demand, and changes are kept."""

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
from zpartition.layout.policy import Tier
from zpartition.memory.mover import PlainMover
from zpartition.memory.placement import (
    ON_DEVICE,
    DeviceParams,
    DiskParams,
    HostParams,
    ParamPlacement,
    StagingBuffers,
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    made = DiskStore.create(tmp_path / "store", DiskOptions(durable=False))
    yield made
    made.close(remove=True)


@pytest.mark.parametrize("tier", list(Tier))
def test_what_was_put_is_taken_and_what_was_dropped_is_not(tier: Tier, store: DiskStore) -> None:
    span = torch.arange(5000).bfloat16()
    expected = span.clone()
    param_stores: dict[Tier, ParamPlacement] = {
        Tier.DEVICE: DeviceParams(span),
        Tier.HOST: HostParams.of(span, PlainMover()),
        Tier.DISK: DiskParams.of(span, PlainMover(), store, StagingBuffers(10**9)),
    }
    param_placement = param_stores[tier]
    param_placement.prefetch()
    assert torch.equal(param_placement.load(), expected)
    assert param_placement.load().data_ptr() == param_placement.load().data_ptr()
    param_placement.load()[7] = 1000.0
    param_placement.write_back()
    expected[7] = 1000.0
    param_placement.prefetch()
    assert torch.equal(param_placement.load(), expected)
    param_placement.unload()
    param_placement.prefetch()  # what is read ahead and then replaced is read again
    param_placement.publish(ON_DEVICE, Parameter(torch.full((5000,), 0.5)))
    assert torch.equal(param_placement.load(), torch.full((5000,), 0.5).bfloat16())
    assert param_placement.num_bytes == span.nbytes * (2 if tier is Tier.DISK else 1)
    assert (param_placement.load().data_ptr() == span.data_ptr()) == (tier is Tier.DEVICE)


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_drive_that_fails_once_is_told_of_and_the_weights_can_be_read_and_written_again(
    kind: str, store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    param_placement = DiskParams.of(torch.zeros(5000), PlainMover(), store, StagingBuffers(10**9))
    assert param_placement.load().eq(0).all()
    param_placement.unload()

    def fails(self: BlockFile, *args: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(BlockFile, kind, fails)
        if kind == "write":
            param_placement.publish(ON_DEVICE, Parameter(torch.ones(5000)))
        with pytest.raises(DiskError, match=os.strerror(errno.EIO)):
            param_placement.load()
        param_placement.prefetch()
        assert param_placement.reading is not None
        param_placement.reading[1].over.wait()
    if kind == "read":
        with pytest.raises(DiskError):  # what was read ahead
            param_placement.load()
        assert param_placement.load().eq(0).all()
        param_placement.unload()
    param_placement.publish(ON_DEVICE, Parameter(torch.full((5000,), 2.0)))
    assert param_placement.load().eq(2).all()
