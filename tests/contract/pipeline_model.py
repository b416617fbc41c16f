"""A small model as a list of layers, whole or in pipeline stages, with or without tied weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import zcomm
import zengine
from zengine.pipeline_engine import PipelineEngine
from zpartition.pipeline import LayerSpec, PipelineModule, TiedLayerSpec

WIDTH, TOKENS, MICRO_BATCH = 16, 11, 2
Pair = tuple[torch.Tensor, torch.Tensor]


def as_logits(embedding: nn.Module, value: torch.Tensor) -> torch.Tensor:
    return value @ embedding.weight.t()  # type: ignore[operator,union-attr]


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def layers(*, tied: bool) -> list[Any]:
    block = [LayerSpec(nn.Linear, WIDTH, WIDTH), torch.tanh, LayerSpec(nn.LayerNorm, WIDTH)]
    if not tied:
        return [LayerSpec(nn.Embedding, TOKENS, WIDTH), *block, *block, LayerSpec(nn.Linear, WIDTH, TOKENS)]
    ends = TiedLayerSpec("e", nn.Embedding, TOKENS, WIDTH)
    return [ends, *block, *block, *block, TiedLayerSpec("e", nn.Embedding, TOKENS, WIDTH, forward_fn=as_logits)]


def names() -> list[str]:
    """Parameter names of the tied model, equal to those of `Plain`."""
    return ["embedding", *(f"blocks.{index}" for index in range(9)), "embedding"]


class Plain(nn.Module):
    """The tied model as a plain module."""

    def __init__(self) -> None:
        super().__init__()
        _, *middle, _ = layers(tied=True)
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleDict({str(i): m.build() for i, m in enumerate(middle) if isinstance(m, LayerSpec)})
        self.functions = {i: m for i, m in enumerate(middle) if not isinstance(m, LayerSpec)}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        value = self.embedding(tokens)
        for index in range(9):
            value = self.functions[index](value) if index in self.functions else self.blocks[str(index)](value)
        return as_logits(self.embedding, value)


def data(step: int, count: int) -> list[Pair]:
    """All micro-batches of a step; replicas take consecutive ones."""
    generator = torch.Generator().manual_seed(step)
    draw = lambda: torch.randint(TOKENS, (MICRO_BATCH, 5), generator=generator)  # noqa: E731
    return [(draw(), draw()) for _ in range(count)]


def mine(step: int, count: int, engine: zengine.Engine) -> list[Pair]:
    """Micro-batches of this replica."""
    groups = engine.parts.groups
    each = count // groups.get_data_parallel_world_size()
    first = groups.get_data_parallel_rank() * each
    return data(step, count)[first : first + each]


def config(stage: int, accumulation: int, **others: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage, **(UNITS if stage == 3 else {})},
        **others,
    }


UNITS = {  # small, gathered again for backward
    "stage3_param_persistence_threshold": 0,
    "stage3_unit_size": 300,
    "stage3_max_live_parameters": 0,
}


def pipelined(
    num_stages: int, stage: int, count: int, *, tied: bool = True, seed: int = 0, per_rank: int = 1, **others: Any
) -> PipelineEngine:
    """Make an engine over all ranks, with `count` micro-batches per step over all replicas."""
    torch.manual_seed(seed)
    options: dict[str, Any] = {"names": names()} if tied else {}
    options["stages_per_rank"] = per_rank
    model = PipelineModule(layers(tied=tied), num_stages, loss_fn=loss_of, **options)
    accumulation = count * num_stages // zcomm.group_size()
    engine = zengine.initialize(model=model, config=config(stage, accumulation, **others))[0]
    assert isinstance(engine, PipelineEngine)
    return engine
