"""A GAN: two engines in one process, each with its own optimizer, that do not know each other.

python examples/gan.py
torchrun --nproc-per-node 2 examples/gan.py
"""

import torch
from torch import nn
from torch.nn import functional as F

import zengine

BATCH = 64


def config(stage: int) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "Adam", "params": {"lr": 4e-3, "betas": [0.5, 0.99]}},
        "zero_optimization": {"stage": stage},
    }


def main(steps: int = 150) -> float:
    torch.manual_seed(0)
    generator, *_ = zengine.initialize(
        model=nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1)), config=config(1)
    )
    critic, *_ = zengine.initialize(
        model=nn.Sequential(nn.Linear(1, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)), config=config(2)
    )
    draw = torch.Generator().manual_seed(1 + generator.global_rank)

    def noise() -> torch.Tensor:
        return torch.randn(BATCH, 4, generator=draw).to(generator.device)

    for _ in range(steps):
        real = (3 + 0.5 * torch.randn(BATCH, 1, generator=draw)).to(generator.device)
        scores = critic(torch.cat([real, generator(noise()).detach()]))
        labels = torch.cat([torch.ones(BATCH, 1), torch.zeros(BATCH, 1)]).to(scores)
        critic.backward(F.binary_cross_entropy_with_logits(scores, labels))
        critic.step()

        scores = critic.module(generator(noise()))  # past the engine: only the generator is trained here
        generator.backward(F.binary_cross_entropy_with_logits(scores, torch.ones_like(scores)))
        generator.step()
        critic.zero_grad()  # the generator's loss left gradients in the critic

    with torch.no_grad():
        mean = torch.cat([generator(noise()) for _ in range(8)]).mean().item()
    if generator.global_rank == 0:
        print(f"the data have the mean 3; the generator's is {mean:.2f}")
    generator.close()
    critic.close()
    return mean


if __name__ == "__main__":
    main()
