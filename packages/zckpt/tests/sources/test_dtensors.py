"""FSDP2 and DTensor over real process groups, against one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from zckpt import CheckpointInputError, find, load, save, views
from zckpt.sources.views import is_dtensor, local_part, local_shard

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
import zckpt

root, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{root}/meet{world}", rank=rank, world_size=world)
mesh = init_device_mesh("cpu", (world,))
peers = zckpt.group_peers()

def script(seed):
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1))
    fully_shard(net, mesh=mesh)
    return net, torch.optim.AdamW(net.parameters(), lr=0.1)

def train(net, optimizer, steps):
    losses = []
    for step in range(steps):
        loss = net(torch.full((2, 3), 1.0 + step)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses

net, optimizer = script(0)
train(net, optimizer, 2)
zckpt.save(f"{root}/fsdp", tensors=zckpt.views(net, optimizer), peers=peers)
expected = train(net, optimizer, 2)
again, fresh = script(1)
zckpt.load(f"{root}/fsdp", tensors=zckpt.views(again, fresh), peers=peers)
assert train(again, fresh, 2) == expected

full = torch.arange(35.0).view(5, 7)
square = init_device_mesh("cpu", (world // 2, 2)) if world > 1 else mesh
cuts = [Shard(1), Shard(0)] if world > 1 else [Shard(0)]
zckpt.save(f"{root}/cut", tensors={"w": distribute_tensor(full, square, cuts)}, peers=peers)
live = distribute_tensor(torch.zeros(5, 7), mesh, [Shard(1)])
zckpt.load(f"{root}/cut", tensors={"w": live}, peers=peers)
assert live.full_tensor().equal(full)
print("done")
dist.destroy_process_group()
"""


def test_fsdp_saves_and_goes_on_and_one_process_takes_it_over(tmp_path: Path) -> None:
    commands = [[sys.executable, "-c", PROGRAM, str(tmp_path), str(rank), "2"] for rank in range(2)]
    ranks = [subprocess.Popen(each, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for each in commands]
    try:
        told = [rank.communicate(timeout=600) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [out for out, _ in told] == ["done\n"] * 2, told
    net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    load(tmp_path / "fsdp", tensors=views(net, optimizer))
    assert optimizer.state[net[0].weight]["exp_avg"].shape == (5, 3)
    assert find(tmp_path / "cut").tensor("w").equal(torch.arange(35.0).view(5, 7))


def test_a_plain_tensor_is_whole() -> None:
    tensor = torch.zeros(2, 3)
    assert not is_dtensor(tensor)
    assert local_part(tensor).data_ptr() == tensor.data_ptr()
    assert local_shard("w", tensor, tensor).span == (0, 6)


def test_placements_that_are_no_plain_cut_are_refused(tmp_path: Path) -> None:
    class Partial:
        def is_replicate(self) -> bool:
            return False

        def __repr__(self) -> str:
            return "Partial(sum)"

    class Fake(torch.Tensor):
        placements = (Partial(),)
        device_mesh = None

        def to_local(self) -> torch.Tensor:
            return self.as_subclass(torch.Tensor)

    with pytest.raises(CheckpointInputError, match=r"w is a DTensor with the placement Partial\(sum\)"):
        save(tmp_path, "a", tensors={"w": torch.zeros(2).as_subclass(Fake)})
