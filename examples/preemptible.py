"""A run that may be taken off its machine at any time, and goes on where it was when it starts again.

python examples/preemptible.py RUN [STEPS [PAUSE_MS]]          stop it with `kill`, start it again
sbatch examples/cluster/train.sbatch                           SLURM: stopped in time, saved, queued again
kubectl apply -f examples/cluster/pytorchjob.yaml              Kubernetes: SIGTERM saves before a pod ends
"""

import contextlib
import sys
import time
from pathlib import Path

import torch
from torch import nn

import zckpt
import zengine


def main(folder: str, steps: int = 200, pause_ms: int = 0) -> tuple[int, float]:
    """Train to `steps`; return the first step of this start, and the last loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2},
        "checkpoint": {"keep": {"last": 2}},  # older ones are deleted after a save
        "signals": {"save_dir": folder, "sigterm": "checkpoint_and_exit"},  # saves after the step, on all ranks
    }
    engine, *_ = zengine.initialize(model=model, config=config)
    with contextlib.suppress(zckpt.CheckpointNotFound):  # on the first start
        engine.load_checkpoint(folder)
    first, loss = engine.global_steps, float("nan")
    if engine.global_rank == 0:
        print(f"starts at step {first}", flush=True)
    while engine.global_steps < steps:
        draw = torch.Generator().manual_seed(engine.global_steps * engine.world_size + engine.global_rank)
        x = torch.randn(8, 8, generator=draw).to(engine.device)  # the batch follows from the step alone
        engine.backward((engine(x) - x.sum(1, keepdim=True)).square().mean())
        loss = engine.step().loss
        time.sleep(pause_ms / 1e3)
    engine.save_checkpoint(folder)
    if engine.global_rank == 0:
        print(f"done at step {steps}: loss {loss:.4f}")
        Path(folder, "done").touch()  # tells the job script that nothing is left
    engine.close()
    return first, loss


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
