"""Tensor parallelism combined with each other split, 2 x 2 on four ranks, at every ZeRO stage.

Curves equal those of one process, with and without accumulation; with it the gradients of embeddings are sparse rows.
The bound is that of float32 sums in another order, as in test_tensor_engine.py: losses and norms are near 3.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import zcomm
import zengine
from zcomm.testing import run_ranks
from zpartition.experts import ExpertMLP, MoE
from zpartition.layout.model_parallel import expert_shards_of
from zpartition.pipeline import LayerSpec, PipelineModule
from zpartition.sequence import SequenceBatches, Split
from zpartition.testing.sequence_models import causal, mean_over, own_mean, ulysses

WIDTH, TOKENS, LENGTH, HEADS = 16, 29, 8, 4
STEPS, CLIP, BOUND = 3, 0.1, 2e-5
CELLS = [(stage, accumulation) for stage in range(4) for accumulation in (1, 3)]
SPECS = [
    {"patterns": [r".*\.(q_proj|k_proj|v_proj|up)\.weight"]},
    {"patterns": [r".*\.(o_proj|down)\.weight"], "partition_type": "row"},
]


class Attention(nn.Module):
    def __init__(self, attend: Any = causal) -> None:
        super().__init__()
        self.num_heads, self.attend = HEADS, attend
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        layers = (self.q_proj, self.k_proj, self.v_proj)
        heads = (layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for layer in layers)
        return x + self.o_proj(self.attend(*heads).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Words(nn.Module):
    """Mean loss from tokens, labels and positions."""

    def __init__(
        self, attend: Any = causal, mean: Any = own_mean, *, experts: bool = False, sparse: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mean = mean
        self.embed, self.place = (nn.Embedding(size, WIDTH, sparse=sparse) for size in (TOKENS, LENGTH))
        self.blocks = nn.ModuleList([Attention(attend), Mlp()])
        self.head = nn.Linear(WIDTH, TOKENS)
        options: dict[str, Any] = {"min_capacity": 64, "use_rts": False, "top2_2nd_expert_sampling": False}
        self.moe = MoE(WIDTH, ExpertMLP(WIDTH, 8), num_experts=4, k=2, **options) if experts else None

    def forward(self, input_ids: Tensor, shift_labels: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.place(position_ids)
        for block in self.blocks:
            x = block(x)
        if self.moe is not None:
            x = x + self.moe(x)[0]
        losses = cross_entropy(self.head(x).flatten(0, 1), shift_labels.flatten(), reduction="sum")
        return self.mean(losses, (shift_labels != -100).sum())


def batch(step: int, micro: int, replica: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + replica)
    tokens = torch.randint(0, TOKENS, (2, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def alone(replicas: int, accumulation: int, *, experts: bool) -> list[float]:
    """Return losses and norms of one process on all data."""
    model, whole, found = Words(experts=experts), SequenceBatches([], Split()), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    for step in range(STEPS):
        total = 0.0
        for micro in range(accumulation):
            for replica in range(replicas):
                loss = model(**whole.piece(batch(step, micro, replica))) / (accumulation * replicas)
                loss.backward()
                total += loss.item()
        found += [total, float(nn.utils.clip_grad_norm_(model.parameters(), CLIP))]
        optimizer.step()
        optimizer.zero_grad()
    return found


def config(stage: int, accumulation: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.0}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20},
        "tensor_parallel": {
            "autotp_size": 2,
            "partition_config": {"layer_specs": SPECS, "use_default_specs": False},
        },
        **more,
    }


def _train(kind: str, stage: int, accumulation: int) -> list[float]:
    sparse = accumulation > 1
    if kind == "sequence":
        group = zcomm.Groups.of(zcomm.Degrees(sequence=2, tensor=2)).sequence()
        model, given = Words(ulysses(group), mean_over(group), sparse=sparse), {"sequence_parallel_size": 2}
        cut = SequenceBatches.over([], group)
    else:
        model = Words(experts=True, sparse=sparse)
        given = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
        cut = SequenceBatches([], Split())
    engine = zengine.initialize(model=model, config=config(stage, accumulation, sparse_gradients=sparse, **given))[0]
    assert bool(expert_shards_of(model)) == (kind == "experts")
    assert sum(bucket.is_sparse for bucket in engine.parts.partition.layout.buckets) == 2 * sparse
    replica, found = engine.parts.groups.get_data_parallel_rank(), []
    for step in range(STEPS):
        for micro in range(accumulation):
            engine.backward(engine(**cut.piece(batch(step, micro, replica))))
            report = engine.step()
        found += [report.loss, report.grad_norm]
    engine.close()
    return found


def _curves(kind: str) -> dict[tuple[int, int], list[float]]:
    return {cell: _train(kind, *cell) for cell in CELLS}


@pytest.mark.parametrize(("kind", "replicas"), [("sequence", 1), ("experts", 2)])
def test_tensor_with_sequence_or_expert_ranks_has_the_curves_of_one_process(kind: str, replicas: int) -> None:
    expected = {each: alone(replicas, each, experts=kind == "experts") for each in (1, 3)}
    assert min(norm for curve in expected.values() for norm in curve[1::2]) > CLIP  # clips
    for found in run_ranks(_curves, 4, kind):
        for cell, curve in found.items():
            assert curve == pytest.approx(expected[cell[1]], abs=BOUND), cell


# -- pipelines -------------------------------------------------------------------------------------


class Plain(nn.Module):
    """(batch, tokens) -> logits, in five layers."""

    @staticmethod
    def layers() -> list[Any]:
        middle = [LayerSpec(Attention), LayerSpec(Mlp), LayerSpec(Mlp)]
        return [LayerSpec(nn.Embedding, TOKENS, WIDTH), *middle, LayerSpec(nn.Linear, WIDTH, TOKENS)]


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def pairs(step: int) -> list[tuple[Tensor, Tensor]]:
    tokens = [batch(step, micro, 0)["input_ids"] for micro in range(4)]
    return [(each, each.flip(1)) for each in tokens]


NAMES = ["a", "b.0", "b.1", "b.2", "c"]


def staged(num_stages: int, stage: int, accumulation: int, **more: Any) -> zengine.Engine:
    torch.manual_seed(0)
    model = PipelineModule(Plain.layers(), num_stages, loss_fn=loss_of, names=NAMES)
    return zengine.initialize(model=model, config=config(stage, accumulation, **more))[0]


def steps(engine: zengine.Engine, first: int, last: int) -> list[float]:
    groups, curve = engine.parts.groups, []
    for step in range(first, last):
        share = len(pairs(step)) // groups.get_data_parallel_world_size()
        mine = pairs(step)[groups.get_data_parallel_rank() * share :][:share]
        engine.train_batch(iter(mine))
        curve += [engine.last_report.loss, engine.last_report.grad_norm]
    return curve


def _staged(root: Path) -> list[list[float]]:
    """Train at each ZeRO stage; resume the last without pipeline stages on twice as many replicas."""
    found = []
    for stage in (0, 1, 2, 3):
        engine = staged(2, stage, 4)
        found.append(steps(engine, 0, STEPS))
        if stage == 3:
            engine.save_checkpoint(str(root))
        engine.close()
    engine = staged(1, 1, 2)
    engine.load_checkpoint(str(root))
    found.append(steps(engine, STEPS, STEPS + 2))
    engine.close()
    wrong = [{"patterns": ["nothing"]}, *SPECS]
    for specs, message in (
        (wrong, "'nothing' matches no weight of any stage"),
        ([], "cannot be inferred.*such as '[a-c]"),
    ):
        split = {"autotp_size": 2, "partition_config": {"layer_specs": specs}}
        with pytest.raises(ValueError, match=message):
            staged(2, 0, 2, tensor_parallel=split)
    return found


def _staged_alone() -> list[float]:
    """Train in one process, two steps longer."""
    torch.manual_seed(0)
    model = PipelineModule(Plain.layers(), num_stages=1, loss_fn=loss_of)
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0), []
    for step in range(STEPS + 2):
        losses = [loss_of(model(x), y) / 4 for x, y in pairs(step)]
        for loss in losses:
            loss.backward()
        found += [sum(loss.item() for loss in losses), float(nn.utils.clip_grad_norm_(model.parameters(), CLIP))]
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_tensor_with_pipeline_ranks_has_the_curves_of_one_process(tmp_path: Path) -> None:
    expected = _staged_alone()
    for rank in run_ranks(_staged, 4, tmp_path):
        *curves, resumed = rank
        for stage, curve in enumerate(curves):
            assert curve == pytest.approx(expected[: 2 * STEPS], abs=BOUND), stage
        assert resumed == pytest.approx(expected[2 * STEPS :], abs=BOUND)
