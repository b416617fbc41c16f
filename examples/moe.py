"""A mixture of experts whose experts live on different ranks.

torchrun --nproc-per-node 2 examples/moe.py
python examples/moe.py
"""

import torch
from torch import nn

import zcomm
import zengine
from zpartition.experts import ExpertMLP, MoE

WIDTH, EXPERTS = 16, 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 1)
        self.moe = MoE(WIDTH, ExpertMLP(WIDTH, 4 * WIDTH), num_experts=EXPERTS, k=2, capacity_factor=2.0)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = self.enter(x)
        out, balance_loss, counts = self.moe(y)
        return self.leave(y + out), balance_loss, counts


def main(steps: int = 40) -> tuple[float, int]:
    world = zcomm.init()
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 32,
        "gradient_clipping": 1.0,
        "expert_parallel": {"enabled": world.world_size > 1, "autoep_size": world.world_size},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2},
    }
    engine, *_ = zengine.initialize(model=Model(), config=config)
    draw = torch.Generator().manual_seed(world.rank)  # ranks process different samples
    losses = []
    for _ in range(steps):
        x = torch.randn(32, 8, generator=draw).to(engine.device)
        y, balance_loss, counts = engine(x)
        engine.backward((y - x.abs().sum(1, keepdim=True)).square().mean() + 0.01 * balance_loss)
        losses.append(engine.step().loss)
    stacked = [param for name, param in engine.module.named_parameters() if "stacked" in name]
    own = stacked[0].shape[0] if stacked else EXPERTS
    if world.rank == 0:
        print(f"{own} of {EXPERTS} experts here; tokens of each: {counts.tolist()}")
        print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    engine.close()
    return losses[-1] / losses[0], own


if __name__ == "__main__":
    main()
