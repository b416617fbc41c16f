"""Starter of a training run, written by `zengine new`.  Replace `Model` and `make_data`, keep the loop.

    python train.py                             one process, on a GPU or the CPU
    torchrun --nproc-per-node 2 train.py        two ranks, each with half of a batch: the same file, the same losses
    zengine explain config.json --world 2       every setting with its origin, memory and traffic of a rank
    zengine report runs/first                   a page of the run: curves, time, memory

Another start goes on from the last checkpoint; `rm -r runs` starts afresh.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import zckpt
import zengine

CONFIG, RUN, EPOCHS = "config.json", "runs/first", 4


class Model(nn.Module):
    """Learn a function of 8 numbers.  Any nn.Module does; ZeRO needs no changes in it."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = nn.functional.mse_loss(self.layers(x), y)
        return loss


def make_data(num_samples: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of input and target.  Any torch Dataset does; all ranks make the same one."""
    draw = torch.Generator().manual_seed(seed)
    return [(x, x.prod(0, keepdim=True) + x.sum(0, keepdim=True)) for x in torch.rand(num_samples, 8, generator=draw)]


def main() -> float:
    """Train up to epoch EPOCHS and return the loss on held-out data."""
    torch.manual_seed(0)  # ranks share rank 0's weights; the seed makes the run repeatable
    engine, _, loader, _ = zengine.initialize(model=Model(), config=CONFIG, training_data=make_data(1024, seed=1))
    try:
        _, state = engine.load_checkpoint(RUN)
    except zckpt.CheckpointNotFound:  # the first start
        state = {"epochs": 0}

    for epoch in range(state["epochs"], EPOCHS):
        for x, y in loader:  # this rank's samples of a micro-batch
            loss = engine(x.to(engine.device), y.to(engine.device))
            engine.backward(loss)  # not loss.backward(): the engine scales it and reduces gradients meanwhile
            engine.step()  # updates once train_batch_size samples are seen; returns a report then, else None
        # every rank calls this; a crash in the middle leaves the previous checkpoint
        engine.save_checkpoint(RUN, client_state={"epochs": epoch + 1})

    engine.eval()
    held_out = make_data(256, seed=2)
    with torch.no_grad():
        x, y = (torch.stack(column).to(engine.device) for column in zip(*held_out))
        loss = engine(x, y).item()
    if engine.global_rank == 0:
        print(f"held-out loss {loss:.4f} after {EPOCHS} epochs; next: zengine report {RUN}")
    engine.close()
    return float(loss)


if __name__ == "__main__":
    main()
