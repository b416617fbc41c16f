#!/usr/bin/env python3
"""A training loop as DeepSpeed's users write it: a small GPT learns text that every machine has.

    torchrun --nproc_per_node 2 tests/docs/train_text.py
    torchrun --nproc_per_node 2 tests/docs/train_text.py --bench_steps 20 --activation_checkpointing
    tensorboard --logdir runs

The text is the Python standard library, byte by byte.  The config beside this file is that of SuperOffload: ZeRO 3,
the optimizer on the CPU, updates that run during backward; where everything is on a CPU already, that is said and
nothing is moved.  The loop knows nothing of speed, tags or files: loss, epoch, learning rate, tokens per second and
TFLOPS go from the engine to the console and to TensorBoard, warm-up steps left out, because the config says so.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

import zengine

CONFIG = Path(__file__).with_name("superoffload.json")
VOCABULARY = 256  # one token a byte


class Text(Dataset):
    """Windows of a text: {"input_ids", "labels"}, each (length,) int64, the labels one byte further on."""

    def __init__(self, num_bytes: int, length: int) -> None:
        root, parts, size = Path(sysconfig.get_path("stdlib")), [], 0
        for path in sorted(root.glob("*.py")):
            parts.append(path.read_bytes())
            size += len(parts[-1])
            if size >= num_bytes:
                break
        self.data = torch.frombuffer(bytearray(b"".join(parts)[:num_bytes]), dtype=torch.uint8)
        self.length = length

    def __len__(self) -> int:
        return (self.data.numel() - 1) // self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.data[index * self.length : (index + 1) * self.length + 1].long()
        return {"input_ids": window[:-1], "labels": window[1:]}


class Block(nn.Module):
    """Attention and a perceptron, each added to what comes in: (batch, length, width) -> the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Returns the mean loss of a batch.  `config` names depth and width, which the TFLOPS formula asks for."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.config = {"n_layer": args.layers, "n_embd": args.width}
        self.recomputes = args.activation_checkpointing
        self.tokens = nn.Embedding(VOCABULARY, args.width)
        self.positions = nn.Embedding(args.max_length, args.width)
        self.blocks = nn.ModuleList(Block(args.width, args.heads) for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), labels.flatten())


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """The config file, with what the command line adds."""
    config: dict[str, Any] = json.loads(Path(args.deepspeed_config).read_text())
    config["steps_per_print"] = args.log_interval
    config["bench_steps"] = args.bench_steps
    config.setdefault("timers", {}).setdefault("throughput", {})["warmup_steps"] = args.warmup_steps
    if args.output:
        place = {"enabled": True, "output_path": args.output}
        config["tensorboard"] = {**place, "job_name": "tensorboard", "gradient_histograms": args.log_interval}
        config["jsonl_monitor"] = {**place, "job_name": "run"}
    return config


def train(args: argparse.Namespace) -> int:
    """The loop; the number of steps that were made."""
    torch.manual_seed(args.seed)
    engine, _optimizer, loader, _scheduler = zengine.initialize(
        model=GPT(args), training_data=Text(args.text_bytes, args.max_length), config=settings(args)
    )
    engine.train()
    for _epoch in range(args.num_epochs):
        for batch in loader:
            loss = engine(**{name: values.to(engine.device) for name, values in batch.items()})
            engine.backward(loss)
            engine.step()
            if engine.monitor.bench_done or engine.global_steps >= args.max_steps:
                engine.close()
                return engine.global_steps
    engine.close()
    return engine.global_steps


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, by the names that DeepSpeed scripts give them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed_config", default=str(CONFIG), help="a JSON file")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by some launchers; torchrun needs none")
    parser.add_argument("--num_epochs", type=int, default=1)
    parser.add_argument("--max_steps", type=int, default=200, help="optimizer steps after which it ends")
    parser.add_argument("--log_interval", type=int, default=10, help="optimizer steps between two lines")
    parser.add_argument("--warmup_steps", type=int, default=3, help="first steps that no speed is told of")
    parser.add_argument("--bench_steps", type=int, default=0, help="measure so many, print a summary and end")
    parser.add_argument("--activation_checkpointing", action="store_true", help="compute activations again")
    parser.add_argument("--output", default="runs/train_text", help="folder of the run; empty writes nothing")
    parser.add_argument("--max_length", type=int, default=128, help="bytes of a window")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--text_bytes", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the options say."""
    return train(parse(argv))


if __name__ == "__main__":
    main()
