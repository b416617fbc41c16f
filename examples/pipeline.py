"""A pipeline: consecutive layers on different ranks, micro-batches by the 1F1B schedule.

torchrun --nproc-per-node 2 examples/pipeline.py
python examples/pipeline.py                                   one stage: the same losses
"""

import torch
from torch import nn

import zcomm
import zengine
from zpartition.pipeline import LayerSpec, PipelineModule, make_schedule, simulate

WIDTH, MICRO_BATCHES = 32, 4


def batches(steps: int):
    """Yield (inputs, labels) of each micro-batch of each step."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps * MICRO_BATCHES):
        x = torch.randn(8, WIDTH, generator=generator)
        yield x, x.sum(1, keepdim=True)


def main(steps: int = 20) -> list[float]:
    world = zcomm.init()
    torch.manual_seed(0)
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH), torch.tanh] * 3 + [LayerSpec(nn.Linear, WIDTH, 1)]
    model = PipelineModule(layers, num_stages=world.world_size, loss_fn=nn.functional.mse_loss)
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 1.0,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "pipeline": {"schedule": "1f1b"},
    }
    engine, *_ = zengine.initialize(model=model, config=config)
    data = batches(steps)
    losses = [float(engine.train_batch(data)) for _ in range(steps)]
    if world.rank == 0:
        print(simulate(make_schedule("1f1b", ranks=world.world_size, micro_batches=MICRO_BATCHES)).text())
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    engine.close()
    return losses


if __name__ == "__main__":
    main()
