"""LAMB, Muon and Adafactor train on sharded tensors as on whole tensors in one process.

The oracle is the optimizer on the module's parameters, over the whole batch, with torch's clipping.  Sums over ranks
round differently from one sum, so the curves agree to rounding (measured: 2e-7).
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
import zengine
import zoptim
from zcomm.testing import run_ranks

NUM_STEPS, BATCH = 10, 48
STRICT = {"stage3_unit_size": 3000, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}
SHAPED: dict[str, dict[str, Any]] = {
    "Lamb": {"lr": 2e-2, "weight_decay": 0.01},
    "Muon": {"lr": 1e-2, "adam_lr": 1e-2, "weight_decay": 0.1},
    "Adafactor": {"lr": 2e-2, "weight_decay": 0.1},
}
each_shaped = pytest.mark.parametrize("name", SHAPED)


class Tiny(nn.Module):
    """Tied embedding and head, wide and tall matrices, stacked matrices, vectors; spans of 1024 cut most of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(61, 40)
        self.body = nn.Sequential(nn.LayerNorm(40), nn.Linear(40, 90), nn.GELU(), nn.Linear(90, 40))
        self.mix = nn.Conv1d(40, 30, 3, padding=1)
        self.back = nn.Linear(30, 40)
        self.head = nn.Linear(40, 61, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(batch[:, :4])
        hidden = hidden + self.body(hidden)
        hidden = hidden + self.back(torch.tanh(self.mix(hidden.mT)).mT)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1).float(), batch[:, 4:].flatten())


def batches() -> torch.Tensor:
    """Four tokens and four targets (step, sample, 8)."""
    tokens = torch.randint(0, 61, (NUM_STEPS, BATCH, 4), generator=torch.Generator().manual_seed(11))
    return torch.cat((tokens, (3 * tokens + 1) % 61), dim=-1)


def alone(name: str, *, half: bool = False) -> list[float]:
    """Oracle; with `half` the model computes in bf16, and the optimizer has fp32 copies of its weights."""
    model = Tiny()
    working = copy.deepcopy(model).bfloat16() if half else model
    optimizer = zoptim.make_optimizer(name, list(model.named_parameters()), SHAPED[name])
    losses = []
    for batch in batches():
        loss = working(batch)
        loss.backward()
        for ours, theirs in zip(model.parameters(), working.parameters()):
            ours.grad = theirs.grad.float()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        for ours, theirs in zip(model.parameters(), working.parameters()):
            theirs.data.copy_(ours.data)
            theirs.grad = None
        losses.append(loss.item())
    return losses


def make(name: str, stage: int, accumulation: int = 1, **extra: Any) -> zengine.Engine:
    config = {
        "train_micro_batch_size_per_gpu": BATCH // accumulation // zcomm.group_size(),
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.5,
        "optimizer": {"type": name, "params": SHAPED[name]},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 9000, **(STRICT if stage == 3 else {})},
        **extra,
    }
    return zengine.initialize(model=Tiny(), config=config)[0]


def train(engine: zengine.Engine, steps: torch.Tensor, accumulation: int = 1) -> list[float]:
    losses = []
    for step in steps:
        for micro in step.chunk(zcomm.group_size())[zcomm.group_rank()].chunk(accumulation):
            engine.backward(engine(micro))
            report = engine.step()
        losses.append(report.loss)
    return losses


def curves(name: str, cases: list[tuple[int, int, dict[str, Any]]]) -> list[list[float]]:
    found = []
    for stage, accumulation, extra in cases:
        engine = make(name, stage, accumulation, **extra)
        found.append(train(engine, batches(), accumulation))
        engine.close()
    return found


@each_shaped
def test_every_stage_world_and_accumulation_has_the_curve_of_one_process(name):
    expected = alone(name)
    assert expected[-1] < 0.97 * expected[0]
    all_cases = [(stage, accumulation) for stage in (0, 1, 2, 3) for accumulation in (1, 3)]
    some = [(1, 3), (2, 1), (3, 1), (3, 3)]
    for world_size, chosen in ((1, some), (2, all_cases), (4, some)):
        cases = [(stage, accumulation, {}) for stage, accumulation in chosen]
        everyone = run_ranks(curves, world_size, name, cases)
        for (stage, accumulation, _), losses in zip(cases, everyone[0]):
            where = f"world {world_size}, stage {stage}, accumulation {accumulation}"
            assert losses == pytest.approx(expected, rel=1e-5), where
        assert all(found == everyone[0] for found in everyone)


@each_shaped
def test_masters_of_half_precision_weights_are_updated_like_whole_tensors(name):
    halves = [{"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 8}}]
    cases = [(stage, 1, extra) for extra in halves for stage in (0, 1, 2, 3)]
    expected = alone(name, half=True)
    for world_size in (1, 2):
        found = run_ranks(curves, world_size, name, cases)[0]
        for (stage, _, extra), losses in zip(cases, found):
            where = f"world {world_size}, stage {stage}, {extra}"
            assert losses == pytest.approx(expected, rel=0.02), where
            assert losses[-1] < 0.98 * losses[0], where
        for same_format in (found[:4], found[4:]):
            for losses in same_format[1:]:
                assert losses == pytest.approx(same_format[0], rel=2e-3), "stages differ by less than formats do"


class LookedUp(nn.Module):
    """An embedding with few rows used per batch, and a frozen matrix."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(150, 24, sparse=sparse)
        self.frozen = nn.Linear(24, 60).requires_grad_(False)
        self.head = nn.Linear(60, 61)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.frozen(self.embed(batch[:, 0])))
        return nn.functional.cross_entropy(self.head(hidden), batch[:, 4])


def rows_and_dense(name: str, stages: list[int]) -> list[list[list[float]]]:
    found = []
    for stage in stages:
        found.append([])
        for sparse in (True, False):
            config = {
                "train_micro_batch_size_per_gpu": BATCH // zcomm.group_size(),
                "sparse_gradients": sparse,
                "optimizer": {"type": name, "params": SHAPED[name]},
                "zero_optimization": {"stage": stage, "reduce_bucket_size": 2000, **(STRICT if stage == 3 else {})},
            }
            engine = zengine.initialize(model=LookedUp(sparse), config=config)[0]
            found[-1].append(train(engine, batches()[:4]))
            engine.close()
    return found


@each_shaped
def test_sparse_row_gradients_are_sharded_like_others(name):
    for rows, dense in run_ranks(rows_and_dense, 2, name, [2, 3])[0]:
        assert rows == pytest.approx(dense, rel=1e-5)
        assert rows[-1] < rows[0]


def rejection(name: str, stage: int) -> str:
    make_optimizer = {"Adafactor": torch.optim.Adafactor, "Muon": torch.optim.Muon}[name]
    model = nn.Linear(40, 40, bias=False)
    try:
        zengine.initialize(
            model=model,
            optimizer=make_optimizer(model.parameters()),
            config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}},
        )
    except ValueError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_torch_optimizers_that_need_shapes_are_rejected_with_the_name_of_ours(name):
    for stage in (1, 3):
        for text in run_ranks(rejection, 2, name, stage):
            assert text.startswith(f"{name} needs whole tensors of full precision")
            assert f"Use zoptim.{name}, which works on shards" in text
