"""Two stages, and in each two ranks that share layers, sequences or experts: curves are those of one process."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from pipeline_model import MICRO_BATCH, TOKENS, config
from torch import Tensor, nn

import zcomm
import zengine
from zcomm.testing import RankFailed, run_ranks
from zpartition.cells import deals_of
from zpartition.experts import ExpertMLP, MoE
from zpartition.pipeline import LayerSpec, PipelineModule
from zpartition.sequence import DistributedAttention, Split, sequence_cross_entropy

WIDTH, TIME, COUNT, STEPS = 16, 8, 4, 3  # COUNT micro-batches a step, over all replicas


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)


class Attention(nn.Module):
    """Over whole sequences, whoever has which part of them."""

    def __init__(self, group: Any, *, shared: bool) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attend = DistributedAttention(causal, group, scatter_idx=1, gather_idx=2) if shared else causal

    def forward(self, value: Tensor) -> Tensor:
        parts = self.qkv(self.norm(value)).chunk(3, -1)
        heads = (part.unflatten(-1, (2, WIDTH // 2)).transpose(1, 2) for part in parts)
        return value + self.out(self.attend(*heads).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        return self.norm(value + self.down(nn.functional.gelu(self.up(value))))  # type: ignore[no-any-return]


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe = MoE(WIDTH, ExpertMLP(WIDTH, 32, "gelu"), 4, k=1, drop_tokens=False, use_rts=False)

    def forward(self, value: Tensor) -> Tensor:
        return value + self.moe(value)[0]  # type: ignore[no-any-return]


@attrs.frozen
class Pair:
    """What ranks of a stage share, and how the config says it."""

    section: dict[str, Any]  # with two ranks; {} for one
    sequence: int = 1
    has_experts: bool = False


SPECS = [
    {"patterns": [r".*\.up\.weight$"], "partition_type": "column"},
    {"patterns": [r".*\.down\.weight$"], "partition_type": "row"},
]
PAIRS = {
    "tensor": Pair(
        {
            "tensor_parallel": {
                "autotp_size": 2,
                "partition_config": {"use_default_specs": False, "layer_specs": SPECS},
            }
        }
    ),
    "sequence": Pair({"sequence_parallel_size": 2}, sequence=2),
    "expert": Pair({"expert_parallel": {"enabled": True, "autoep_size": 2}}, has_experts=True),
}
INFERRED = Pair({"tensor_parallel": {"autotp_size": 2}})


def model_of(pair: Pair, num_stages: int, groups: zcomm.Groups) -> PipelineModule:
    """The last stage has no experts."""
    group, shared = groups.sequence(), pair.sequence > 1
    attention = LayerSpec(Attention, group, shared=shared)
    block = [attention, LayerSpec(Mixture) if pair.has_experts else LayerSpec(Mlp)]
    layers = [
        LayerSpec(nn.Embedding, TOKENS, WIDTH),
        *block,
        *block,
        LayerSpec(Mlp),
        LayerSpec(nn.Linear, WIDTH, TOKENS),
    ]

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        if shared:
            return sequence_cross_entropy(logits, labels, group)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    return PipelineModule(layers, num_stages, loss_fn=loss, partition_method="type:mixture|mlp|linear")


def train(pair: Pair, num_stages: int, stages: tuple[int, ...]) -> list[list[float]]:
    """Loss and norm of each step, and of an evaluation, by ZeRO stage."""
    found = []
    for stage in stages:
        groups = zcomm.Groups.of(zcomm.Degrees(pipeline=num_stages, sequence=pair.sequence))
        torch.manual_seed(0)
        model, own = model_of(pair, num_stages, groups), Split(pair.sequence, groups.get_sequence_parallel_rank())
        replicas = zcomm.group_size() // num_stages if pair.has_experts else 1
        section = pair.section if num_stages > 1 else {}
        engine = zengine.initialize(model=model, config=config(stage, COUNT // replicas, **section))[0]
        with engine:
            assert bool(deals_of(model)) == (
                num_stages > 1 and any(isinstance(part, Mixture) for part in model.modules())
            )
            each, first = COUNT // replicas, engine.parts.groups.get_data_parallel_rank() * (COUNT // replicas)

            def mine(step: int, first: int = first, each: int = each, own: Split = own) -> Any:
                generator = torch.Generator().manual_seed(step)
                size = (MICRO_BATCH, TIME)
                all_of_them = [[torch.randint(TOKENS, size, generator=generator) for _ in "xy"] for _ in range(COUNT)]
                return iter([[own.take(part) for part in pair] for pair in all_of_them[first : first + each]])

            numbers: list[float] = []
            for step in range(STEPS):
                engine.train_batch(mine(step))
                numbers += [engine.last_report.loss, engine.last_report.grad_norm]
            found.append([*numbers, engine.eval_batch(mine(99)).item()])
    return found


@pytest.mark.parametrize("name", PAIRS)
def test_two_ranks_of_each_stage_share_it(name: str) -> None:
    pair = PAIRS[name]
    ((expected,),) = run_ranks(train, 1, attrs.evolve(pair, sequence=1), 1, (0,))
    for found in run_ranks(train, 4, pair, 2, (0, 1, 2, 3), timeout_s=100):
        for numbers in found:
            assert numbers == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_how_a_part_of_a_model_is_split_has_to_be_written() -> None:
    with pytest.raises(RankFailed, match="tensor_parallel of a PipelineModule: how its layers are split"):
        run_ranks(train, 4, INFERRED, 2, (0,))
