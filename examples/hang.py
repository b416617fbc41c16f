"""Two hangs, and the diagnosis that every rank raises instead.

torchrun --nproc-per-node 2 examples/hang.py save                      rank 0 saves a checkpoint, rank 1 trains on
ZCOMM_TIMEOUT_S=5 torchrun --nproc-per-node 2 examples/hang.py stuck   rank 1 waits for something else
"""

import sys
import time

import torch
from torch import nn

import zcomm
import zengine


def read_batch(step: int, is_stuck: bool) -> torch.Tensor:
    if is_stuck and step == 1:
        time.sleep(20)  # a lock, a file server, a breakpoint
    return torch.ones(2, 4)


def train(mistake: str) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 2},
    }
    engine, *_ = zengine.initialize(model=nn.Linear(4, 1), config=config)
    rank = engine.global_rank
    for step in range(3):
        batch = read_batch(step, mistake == "stuck" and rank == 1).to(engine.device)
        with zcomm.context(f"step {step}"):
            engine.backward(engine(batch).square().mean())
            engine.step()
            if mistake == "save" and step == 1 and rank == 0:
                engine.save_checkpoint("runs/hang")


def main(mistake: str) -> str:
    """Return the error of this rank."""
    try:
        train(mistake)
    except zcomm.CollectiveFailed as error:
        return str(error)
    return "nothing failed"


if __name__ == "__main__":
    said = main(sys.argv[1])
    if zcomm.group_rank() == 0:
        print(said)
