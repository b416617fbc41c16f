#!/usr/bin/env python3
"""Teach the main job's byte GPT to close brackets by GRPO (Shao et al. 2024, arXiv 2402.03300), at ZeRO stage 3.

    torchrun --nproc_per_node 2 examples/grpo.py --output runs/grpo
    tensorboard --logdir runs/grpo; zengine report runs/grpo

A supervised phase shows lines such as "(()())", of which many end before all brackets are closed.  Then adapters are
trained by rollouts: for each beginning of a line the engine draws a group of endings, and the policy moves towards
those that are better than their group.  The base under the adapters is the reference of the KL penalty, so there is
no second model; rollouts are exact, so their log-probabilities are the policy's, bit for bit, without a correction.
In 60 steps (100 s on two cores) the share of lines that close all brackets grows from 14% to 81%.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

import zengine
from zengine.adapters import LoRAConfig, add_lora
from zengine.rollout import RolloutConfig, RolloutSample, SamplingConfig

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))
from train.model import GPT, Shape

CONFIG = {
    "train_micro_batch_size_per_gpu": 64,
    "optimizer": {"type": "AdamW", "params": {"lr": 1.5e-3, "weight_decay": 0.0}},
    "zero_optimization": {"stage": 3},
    "hybrid_engine": {"enabled": True, "max_out_tokens": 48},
}
OPEN, CLOSE, END, LONGEST, KL_WEIGHT = *b"()\n", 12, 0.02  # LONGEST: bytes of a beginning
SHAPE, TARGETS = Shape(depth=2, width=64, heads=2, context=64), ["qkv", "attention_out", "mlp_in", "mlp_out"]


class Policy(GPT):
    """The main job's model; its forward returns the scores of the next byte, (batch, time, 256)."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.logits(tokens)


def beginning(random: Random) -> list[int]:
    """Return a line so far, in which at least one bracket is open."""
    line = [OPEN]
    for _ in range(random.randrange(LONGEST)):
        line.append(OPEN if line.count(OPEN) == line.count(CLOSE) + 1 or random.random() < 0.5 else CLOSE)
    return line


def reward(sample: RolloutSample) -> float:
    """Return 1 for a line that ends when all brackets are closed, else less for each bracket too few or too many."""
    depth = sum({OPEN: 1, CLOSE: -1}.get(byte, 0) for byte in (*sample.prompt, *sample.tokens))
    return 1.0 if depth == 0 and sample.finish == "token" else -0.1 * abs(depth)


def log_probs(engine: zengine.Engine, samples: Sequence[RolloutSample]) -> torch.Tensor:
    """Return the log-probability of each new byte, one sample after the other: (bytes,)."""
    ids = pad_sequence([torch.tensor((*each.prompt, *each.tokens)) for each in samples], batch_first=True)
    scores = engine(ids[:, :-1].to(engine.device))  # a causal model does not see the padding, which is on the right
    found = torch.log_softmax(scores.float(), -1).gather(-1, ids[:, 1:, None].to(scores.device))[..., 0]
    spans = [slice(len(each.prompt) - 1, len(each.prompt) - 1 + len(each.tokens)) for each in samples]
    return torch.cat([row[span] for row, span in zip(found, spans)])


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train; return the share of solved samples in each step, on this rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--warmup", type=int, default=200, help="supervised steps")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", default="", help="folder for TensorBoard's events and the page's record")
    options = parser.parse_args(arguments)
    engine, *_ = zengine.initialize(model=Policy(SHAPE), config=CONFIG)
    random = Random(engine.global_rank)
    for _ in range(options.warmup):
        lines = [beginning(random) for _ in range(64)]
        lines = [
            [*line, *[CLOSE] * random.randrange(line.count(OPEN) - line.count(CLOSE) + 1), END] for line in lines
        ]
        ids = pad_sequence([torch.tensor(line) for line in lines], batch_first=True).to(engine.device)
        engine.backward(F.cross_entropy(engine(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0))
        engine.step()
    model, weights = Policy(SHAPE), engine.module_state_dict()
    engine.close()
    model.load_state_dict(weights)
    add_lora(model, LoRAConfig(lora_r=16, lora_alpha=32.0, target_mods=TARGETS))
    folder = {"enabled": bool(options.output), "output_path": options.output, "job_name": ""}
    settings = {**CONFIG, "tensorboard": folder, "jsonl_monitor": folder}
    engine, *_ = zengine.initialize(model=model, config=settings)
    solved, rule, exact = [], SamplingConfig(max_new_tokens=24, stop_tokens=(END,)), RolloutConfig(exact=True)
    for step in range(1, options.steps + 1):
        samples = engine.rollout([beginning(random) for _ in range(16)], 8, rule, config=exact).samples
        rewards = torch.tensor([reward(each) for each in samples], device=engine.device).view(16, 8)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        present = log_probs(engine, samples)
        reference = torch.tensor(sum(engine.log_probs(samples, reference=True), ()), device=engine.device)
        lengths = torch.tensor([len(each.tokens) for each in samples], device=engine.device)
        ratio, gap = torch.exp(present - present.detach()), reference - present
        kl = (torch.expm1(gap) - gap).mean()  # k3 of Schulman 2020
        engine.backward(KL_WEIGHT * kl - (ratio * advantages.flatten().repeat_interleave(lengths)).mean())
        engine.step()
        solved.append(float((rewards == 1).float().mean()))
        values = {"reward": float(rewards.mean()), "solved": solved[-1], "reference_kl": float(kl.detach())}
        engine.monitor.write_events([(f"rollout/{name}", value, step) for name, value in values.items()])
        if engine.global_rank == 0 and (step % 10 == 0 or step == 1):
            print(f"step {step:3}: " + ", ".join(f"{name} {value:.3f}" for name, value in values.items()))
    engine.close()
    return solved


if __name__ == "__main__":
    main()
