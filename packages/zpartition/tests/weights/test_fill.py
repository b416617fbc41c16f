"""Materialized values reach their storages."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zpartition
from zcomm.testing import run_ranks
from zpartition import ZeroPolicy


class Net(nn.Module):
    """A trained and a frozen layer, a scalar, a buffer that is state and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.frozen = nn.Linear(30, 50), nn.Linear(50, 20)
        self.frozen.requires_grad_(False)
        self.gain = nn.Parameter(torch.rand(()))
        self.register_buffer("kept", torch.rand(4))
        self.register_buffer("scratch", torch.rand(4), persistent=False)


def _fills(stage: int, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    found = []
    for deferred in (False, True):
        torch.manual_seed(1)
        with zpartition.Init(enabled=deferred):
            model = Net()
        with zpartition.recording(model):
            model.to(dtype)
        policy = ZeroPolicy(stage=stage, unit_numel=1000, persist_numel=5)
        partition = zpartition.shard(model, policy=policy)
        state = {**model.state_dict(), "scratch": model.scratch}
        state |= {f"master of {shard.name}": shard.tensor for shard in partition.shards()}
        found.append({name: tensor.clone() for name, tensor in state.items()})
        partition.close()
    return found[0], found[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_every_place_gets_what_a_plain_build_gives_it(stage: int, dtype: torch.dtype) -> None:
    for plain, deferred in run_ranks(_fills, 2, stage, dtype):
        assert list(plain) == list(deferred)
        for name in plain:
            assert plain[name].dtype is deferred[name].dtype
            assert torch.equal(plain[name], deferred[name]), name
