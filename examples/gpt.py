"""Train a small GPT from scratch on Python's own source code, then let it write.

python examples/gpt.py                                     on one device
torchrun --nproc-per-node 2 examples/gpt.py                on two; the same code
"""

import json

import torch
from torch import nn
from torch.nn import functional as F

import zengine

WIDTH, HEADS, LAYERS, LENGTH, BATCH = 64, 4, 2, 64, 16
CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 3e-3}},
    "zero_optimization": {"stage": 2},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Bytes in, the mean loss of the next byte out; without `targets` the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        logits = self.head(self.norm(self.blocks(x)))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def text() -> torch.Tensor:
    """Return source code that every Python installation has, as bytes."""
    with open(json.decoder.__file__, "rb") as file:
        return torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long()


def main(steps: int = 60) -> float:
    torch.manual_seed(0)
    engine, *_ = zengine.initialize(model=GPT(), config=CONFIG)
    data, draw = text(), torch.Generator().manual_seed(engine.global_rank)  # other batches on every rank
    for step in range(1, steps + 1):
        starts = torch.randint(len(data) - LENGTH, (BATCH,), generator=draw)
        rows = torch.stack([data[start : start + LENGTH + 1] for start in starts.tolist()]).to(engine.device)
        engine.backward(engine(rows[:, :-1], rows[:, 1:]))
        report = engine.step()
        if engine.global_rank == 0 and step % 20 == 0:
            print(report)  # loss, norm and learning rate of the step

    ids = torch.tensor([list(b"def ")], device=engine.device)
    engine.eval()
    with torch.no_grad():
        for _ in range(40):
            logits = engine(ids[:, -LENGTH:])[0, -1]
            ids = torch.cat([ids, logits.argmax().view(1, 1)], dim=1)
    if engine.global_rank == 0:
        print(bytes(ids[0].tolist()).decode("utf-8", errors="replace"))
    engine.close()
    return report.loss


if __name__ == "__main__":
    main()
