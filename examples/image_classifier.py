"""Train a convolutional classifier in bf16 with fp32 masters, and measure its accuracy.

python examples/image_classifier.py
torchrun --nproc-per-node 2 examples/image_classifier.py

The pictures are drawn here, so nothing is downloaded: bars that stand or lie, and crosses, in noise.
"""

import torch
from torch import nn

import zengine

CONFIG = {
    "train_micro_batch_size_per_gpu": 32,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True, "check_grad_overflow": True},  # masters and states stay float32
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "zero_optimization": {"stage": 1},
}


def draw(count: int, seed: int) -> list[tuple[torch.Tensor, int]]:
    """Return pictures (1, 16, 16) with their class: 0 stands, 1 lies, 2 is a cross."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(count):
        row, column = torch.randint(3, 13, (2,), generator=generator).tolist()
        picture = 0.5 * torch.randn(1, 16, 16, generator=generator)
        kind = index % 3
        if kind != 1:
            picture[0, 2:14, column] += 2
        if kind != 0:
            picture[0, row, 2:14] += 2
        found.append((picture, kind))
    return found


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveMaxPool2d(1)),
        *(nn.Flatten(), nn.Linear(32, 3)),
    )


def main(epochs: int = 3) -> float:
    engine, _, loader, _ = zengine.initialize(model=make_model(), config=CONFIG, training_data=draw(576, seed=1))
    for _ in range(epochs):
        engine.train()
        for pictures, labels in loader:
            logits = engine(pictures.to(engine.device, torch.bfloat16))
            engine.backward(nn.functional.cross_entropy(logits.float(), labels.to(engine.device)))
            report = engine.step()
        if engine.global_rank == 0:
            print(report)

    engine.eval()
    pictures, labels = zip(*draw(300, seed=2))
    with torch.no_grad():
        found = engine(torch.stack(pictures).to(engine.device, torch.bfloat16)).argmax(1).cpu()
    accuracy = (found == torch.tensor(labels)).float().mean().item()
    if engine.global_rank == 0:
        print(f"accuracy {accuracy:.1%}")
    engine.close()
    return accuracy


if __name__ == "__main__":
    main()
