"""Any stage, world size and accumulation trains like a plain PyTorch loop.

20 clipped AdamW steps of a small GPT-like model with tied weights and two parameter groups.  The oracle, one process,
receives the data of all ranks in the same order.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import zcomm
import zengine
from zcomm.testing import run_ranks

NUM_STEPS = 20
STAGES = (0, 1, 2, 3)
# Shards every parameter and reshards between forward and backward.
STRICT = {"stage3_unit_size": 2500, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}
CLIP = 0.5


class Tiny(nn.Module):
    """Two pre-norm MLP blocks over tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(17, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2)
        )
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 17, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(batch[:, :-1])
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits = self.head(self.norm(hidden))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def groups(model: nn.Module) -> list[dict[str, object]]:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def batches(world_size: int, accumulation: int) -> torch.Tensor:
    """Tokens of (step, micro-step, rank): half pattern, half noise, so that the loss falls but stays far from 0."""
    generator = torch.Generator().manual_seed(11)
    shape = (NUM_STEPS, accumulation, world_size, 4)
    starts = torch.randint(0, 17, (*shape, 1), generator=generator)
    noise = torch.randint(0, 17, (*shape, 9), generator=generator)
    return torch.where(torch.rand(*shape, 9, generator=generator) < 0.3, noise, (starts + 3 * torch.arange(9)) % 17)


def plain_loop(world_size: int, accumulation: int) -> list[float]:
    """Oracle: a plain loop in one process."""
    model = Tiny()
    optimizer = torch.optim.AdamW(groups(model), lr=2e-2)
    losses = []
    for step in batches(world_size, accumulation):
        total = 0.0
        for tokens in step.flatten(0, 1):
            loss = model(tokens) / (accumulation * world_size)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def engine_loop(stage: int, accumulation: int, extra: dict[str, object]) -> tuple[list[float], list[float]]:
    """Return (losses, gradient norms) of one rank of the engine."""
    model = Tiny()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-2}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 2000, "reduce_at": "micro_step", **STRICT},
        **extra,
    }
    engine, *_ = zengine.initialize(model=model, model_parameters=groups(model), config=config)
    losses, norms = [], []
    for step in batches(zcomm.group_size(), accumulation):
        for micro in step:
            loss = engine(micro[zcomm.group_rank()])
            engine.backward(loss)
            report = engine.step()
        assert report
        losses.append(report.loss)
        norms.append(report.grad_norm)
    engine.close()
    return losses, norms


def all_stages(accumulation: int, extra: dict[str, object]) -> list[tuple[list[float], list[float]]]:
    return [engine_loop(stage, accumulation, extra) for stage in STAGES]


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_stage_has_the_loss_curve_of_a_plain_loop(world_size, accumulation):
    expected = plain_loop(world_size, accumulation)
    assert expected[-1] < 0.9 * expected[0]
    for by_stage in run_ranks(all_stages, world_size, accumulation, {}):
        for losses, _ in by_stage:
            assert losses == pytest.approx(expected, rel=1e-6)
        for (losses, norms), (other_losses, other_norms) in itertools.pairwise(by_stage):
            assert losses == other_losses
            # float64 sums in another order; units shift elements against the runs that are added up in float32
            assert norms == pytest.approx(other_norms, rel=1e-9)


@pytest.mark.parametrize("section", ["bf16", "fp16"])
def test_half_precision_stages_agree_bit_for_bit_and_learn(section):
    sections = {"bf16": {"enabled": True}, "fp16": {"enabled": True, "initial_scale_power": 8}}
    ours = run_ranks(all_stages, 2, 2, {section: sections[section]})
    first = ours[0][0][0]
    assert first[-1] < 0.9 * first[0]
    assert all(losses == first for by_stage in ours for losses, _ in by_stage)
