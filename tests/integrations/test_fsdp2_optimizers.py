"""Optimizers of zoptim on the DTensors of FSDP2: what they do to the whole weights."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import zoptim
from zcomm.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*plain torch operations")


def trained(name: str, is_sharded: bool) -> list[Tensor]:
    """Return the weights after three steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 5))
    if is_sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = getattr(zoptim, name)(model.parameters(), lr=0.05, weight_decay=0.1)
    for step in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = [param.detach() for param in model.parameters()]
    return [weight.full_tensor() if isinstance(weight, DTensor) else weight for weight in weights]


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion", "Muon", "LAMB", "Adagrad"])
def test_sharded_weights_train_like_whole_ones(name: str) -> None:
    for found in run_ranks(trained, 2, name, True):
        for ours, whole in zip(found, trained(name, False), strict=True):
            torch.testing.assert_close(ours, whole, rtol=1e-5, atol=1e-6)
