"""Save under one split and resume under another: other stage, other number of ranks, no converter.

python examples/resume.py RUN                                  trains 6 steps and saves
torchrun --nproc-per-node 2 examples/resume.py RUN             finds the checkpoint and goes on, at stage 3
"""

import sys
import tempfile

import torch
from torch import nn

import zckpt
import zengine


def train(folder: str, stage: int, first: int, last: int) -> list[float]:
    """Load what `folder` has, train the steps first..last, save."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    config = {
        "train_batch_size": 8,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})},
        "checkpoint": {"keep": {"last": 2}},  # older ones are deleted after a save
    }
    engine, *_ = zengine.initialize(model=model, config=config)
    path, client_state = engine.load_checkpoint(folder) if first else (None, {})
    assert not first or client_state["step"] == first, path
    losses, per_rank = [], 8 // engine.world_size
    for step in range(first, last):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        x = x[engine.global_rank * per_rank :][:per_rank].to(engine.device)
        engine.backward((engine(x) - x.sum(1, keepdim=True)).square().mean())
        losses.append(engine.step().loss)
    engine.save_checkpoint(folder, client_state={"step": last})
    if engine.global_rank == 0:
        print(f"steps {first} to {last} at stage {stage}: loss {losses[-1]:.6f}")
    engine.close()
    return losses


def main(folder: str = "") -> tuple[list[float], list[float]]:
    """Return the losses of a run that changes its stage in the middle, and those of an uninterrupted one."""
    with tempfile.TemporaryDirectory() as other:
        whole = train(other, stage=2, first=0, last=6)
    with tempfile.TemporaryDirectory() as own:
        folder = folder or own
        return train(folder, stage=2, first=0, last=3) + train(folder, stage=3, first=3, last=6), whole


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        try:
            done = int(zckpt.find(sys.argv[1]).objects["client_state"]["step"])
        except zckpt.CheckpointNotFound:
            done = 0
        train(sys.argv[1], stage=3 if done else 2, first=done, last=done + 6)
