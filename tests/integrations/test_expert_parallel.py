"""Transformers' MoE models with experts sharded over two ranks by one config key."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zcomm
import zengine
import zengine.deepspeed as deepspeed
from zcomm.testing import run_ranks
from zpartition.experts import ExpertParameter

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
    "head_dim": 8,
    "intermediate_size": 24,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
}
STEPS = 3


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "mixtral":
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, num_local_experts=4))
    if name == "qwen3":
        config = transformers.Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=12)
        return transformers.Qwen3MoeForCausalLM(config)
    config = transformers.GptOssConfig(**SIZES, num_local_experts=4, layer_types=["full_attention"] * 2)
    return transformers.GptOssForCausalLM(config)


def tokens(step: int, replica: int) -> torch.Tensor:
    return torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(10 * step + replica))


def alone(name: str) -> list[float]:
    """Return mean losses of plain PyTorch on both replicas' tokens."""
    model = make(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        total = 0.0
        for replica in range(2):
            batch = tokens(step, replica)
            loss = model(input_ids=batch, labels=batch).loss / 2
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def _trained(runs: list[tuple[str, int, bool]]) -> list[tuple[list[float], int]]:
    """Return the results of runs: (model, stage, True to build it inside zero.Init)."""
    found = []
    for name, stage, is_deferred in runs:
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20},
            "expert_parallel": {"enabled": True, "autoep_size": 2, "moe_layer_pattern": r"layers\.[0-9]+\.mlp"},
        }
        with deepspeed.zero.Init(enabled=is_deferred):
            model = make(name)
        engine = zengine.initialize(model=model, config=config)[0]
        losses = []
        for step in range(STEPS):
            batch = tokens(step, zcomm.group_rank())
            engine.backward(engine(input_ids=batch, labels=batch).loss)
            report = engine.step()
            assert report is not None
            losses.append(report.loss)
        found.append((losses, sum(isinstance(param, ExpertParameter) for param in model.parameters())))
        engine.close()
    return found


def test_three_model_families_train_with_sharded_experts() -> None:
    """Train at stages 1 to 3, with and without zero.Init, with the models' forward, biases and auxiliary loss."""
    runs = [
        ("mixtral", 1, False),
        ("qwen3", 2, False),
        ("gptoss", 3, False),
        ("mixtral", 3, True),
        ("gptoss", 2, True),
    ]
    expected = {name: alone(name) for name in ("mixtral", "qwen3", "gptoss")}
    for answers in run_ranks(_trained, 2, runs):
        for (name, *how), (losses, num_dealt) in zip(runs, answers):
            assert losses == pytest.approx(expected[name], abs=2e-5), (name, how)
            assert num_dealt == (8 if name == "gptoss" else 4)  # two layers; with biases, twice as many
