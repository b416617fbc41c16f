"""Long sequences: ranks share the tokens of each sample; attention passes keys and values around a ring.

torchrun --nproc-per-node 2 examples/sequence_parallel.py
python examples/sequence_parallel.py                          one rank: the same losses, up to rounding
"""

import torch
from torch import nn

import zcomm
import zengine
from zpartition.sequence import Order, SequenceBatches, chunked_cross_entropy, mean_over_sequence, ring_attention

WIDTH, HEADS, LENGTH, VOCABULARY = 32, 4, 64, 32


class Model(nn.Module):
    """One attention block over the tokens of all ranks; every other layer sees this rank's tokens."""

    def __init__(self, group: torch.distributed.ProcessGroup | None) -> None:
        super().__init__()
        self.group = group
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.qkv, self.norm = nn.Linear(WIDTH, 3 * WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, shift_labels: torch.Tensor):
        """Return the loss over the tokens of all ranks; arguments (rows, own tokens) int64."""
        x = self.tokens(input_ids) + self.places(position_ids)
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        x = x + ring_attention(q, k, v, self.group, is_causal=True).transpose(1, 2).flatten(2)
        total = chunked_cross_entropy(self.norm(x), self.head.weight, shift_labels, reduction="sum", tile_tokens=16)
        return mean_over_sequence(total, (shift_labels != -100).sum(), self.group)  # over the tokens of all ranks


def main(steps: int = 30) -> list[float]:
    world = zcomm.init()
    group = zcomm.Groups.of(zcomm.Degrees(sequence=world.world_size)).sequence()
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "sequence_parallel_size": world.world_size,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3},
    }
    engine, *_ = zengine.initialize(model=Model(group), config=config)
    splitter = SequenceBatches.over([], group, order=Order.ZIGZAG)  # an early and a late run of tokens for each rank
    losses = []
    for step in range(steps):
        first = torch.randint(VOCABULARY, (4, 1), generator=torch.Generator().manual_seed(step))
        rows = (first + torch.arange(LENGTH)) % VOCABULARY  # the same rows on ranks that share tokens
        engine.backward(engine(**splitter.piece({"input_ids": rows, "labels": rows})))
        losses.append(engine.step().loss)
    if world.rank == 0:
        print(f"{LENGTH // world.world_size} tokens of each sample on this rank")
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    engine.close()
    return losses


if __name__ == "__main__":
    main()
