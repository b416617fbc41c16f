"""Train with masters and optimizer states in files: memory holds weights and one bucket at a time.

python examples/offload_disk.py
torchrun --nproc-per-node 2 examples/offload_disk.py

The tier changes where bytes live and no bit of the result, which the script checks against a run in memory.
"""

import tempfile

import torch
from torch import nn

import zengine
import zpartition


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.GELU())), nn.Linear(256, 1))


def train(offload: dict[str, object], steps: int) -> list[float]:
    """Return the losses."""
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True, "check_grad_overflow": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2, **({"offload_optimizer": offload} if offload else {})},
    }
    engine, *_ = zengine.initialize(model=make_model(), config=config)
    losses = []
    for _ in range(steps):  # one batch, again and again
        x = torch.randn(8, 256, generator=torch.Generator().manual_seed(1)).to(engine.device, torch.bfloat16)
        engine.backward((engine(x).float() - x[:, :1]).square().mean())
        losses.append(engine.step().loss)
    state = zpartition.safe_get_full_optimizer_state(engine.module[0].weight, "exp_avg")  # wherever it lives
    assert state is not None
    engine.close()
    return losses


def main(steps: int = 5) -> tuple[list[float], list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        on_disk = train({"device": "nvme", "nvme_path": folder}, steps)
    in_memory = train({}, steps)
    print(f"losses with states on disk {on_disk}\nlosses with states in memory {in_memory}")
    return on_disk, in_memory


if __name__ == "__main__":
    main()
