"""FSDP2's loop with zpartition: `shard` in place of `fully_shard`, and a torch optimizer, without an engine.

python examples/from_fsdp2.py
torchrun --nproc-per-node 2 examples/from_fsdp2.py
"""

import torch
from torch import nn

import zcomm
import zpartition
from zpartition import ZeroPolicy


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def main(steps: int = 20) -> float:
    world = zcomm.init(device="cpu")  # torchrun's world, or a world of one
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    # FSDP2:  for layer in model: fully_shard(layer);  fully_shard(model)
    partition = zpartition.shard(model, optimizer, policy=ZeroPolicy(stage=3))

    batches = [torch.randn(8, 16, generator=torch.Generator().manual_seed(step)) for step in range(steps)]
    for x in batches:  # the same batch on every rank, so that a plain loop is the oracle
        with partition.micro_step(is_last=True):
            loss = loss_of(model, x)
            loss.backward()
        partition.finish_gradients()
        partition.apply(optimizer.step)
        partition.zero_grad()

    plain = make_model()
    oracle = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for x in batches:
        expected = loss_of(plain, x)
        expected.backward()
        oracle.step()
        oracle.zero_grad()

    with zpartition.gathered(model):  # whole weights, as FSDP2's unshard()
        difference = max((a - b).abs().max().item() for a, b in zip(model.parameters(), plain.parameters()))
    if world.rank == 0:
        print(f"loss {loss.item():.6f}, of a plain loop {expected.item():.6f}; weights differ by {difference:.1e}")
    partition.close()
    return difference


if __name__ == "__main__":
    main()
