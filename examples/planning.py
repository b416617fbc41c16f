"""Plan a run before renting the machines: bytes of a rank by owner, at each ZeRO stage, without allocating any.

python examples/planning.py
"""

import torch
from torch import nn

import zoptim
import zpartition
from zpartition import ReduceAt, ZeroPolicy


def make_model(width: int = 4096, layers: int = 24) -> nn.Module:
    """Return a model of five billion parameters, on the meta device."""
    with torch.device("meta"):
        block = [nn.TransformerEncoderLayer(width, 32, 4 * width, batch_first=True) for _ in range(layers)]
        return nn.ModuleList([nn.Embedding(32_000, width), *block])


def main(world_size: int = 8) -> dict[int, int]:
    model = make_model()
    num_params = sum(param.numel() for param in model.parameters())
    print(f"{num_params / 1e9:.2f} billion parameters in float32 on {world_size} ranks")
    found = {}
    for stage in (0, 1, 2, 3):
        moment = ReduceAt.BOUNDARY if stage < 2 else ReduceAt.MICRO_STEP  # as a config has them
        policy = ZeroPolicy(stage=stage, reduce_at=moment)
        plan = zpartition.plan(model, policy=policy, world_size=world_size, optimizer=zoptim.AdamW, num_backwards=4)
        found[stage] = plan.total_bytes
        print(f"stage {stage}: {plan.total_bytes / 1e9:6.1f} GB a rank, without activations")
    return found


if __name__ == "__main__":
    main()
