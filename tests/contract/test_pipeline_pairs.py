"""Two pipeline stages combined with tensor, sequence or expert parallelism, or two of these.

Curves equal those of one process, at every ZeRO stage, with one and several micro-batches per step.  Layers with
experts pass on two tensors: activations, and the sum of load-balancing losses so far, which the last stage adds to
the loss.  (Under sequence parallelism that loss is computed per part of a sequence, so it is left out.)

With several micro-batches the embedding's gradients are sparse rows.  The bound: float32 sums in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import torch
from pipeline_model import MICRO_BATCH, TOKENS, config
from torch import Tensor, nn

import zcomm
import zengine
from zcomm.testing import RankFailed, run_ranks
from zpartition.experts import ExpertMLP, MoE
from zpartition.layout.model_parallel import expert_shards_of
from zpartition.pipeline import LayerSpec, PipelineModule
from zpartition.pipeline.channels import Channels
from zpartition.sequence import DistributedAttention, Split, sequence_cross_entropy

WIDTH, TIME, STEPS, CLIP, BOUND = 16, 8, 3, 0.3, 1e-5
CELLS = [(stage, accumulation) for stage in range(4) for accumulation in (1, 4)]


Handed = tuple[Tensor, ...]  # (batch, time, width), and () the load-balancing loss so far


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)


class Attention(nn.Module):
    """Attention over whole sequences, split or not."""

    def __init__(self, group: Any, *, shared: bool) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attend = DistributedAttention(causal, group, scatter_idx=1, gather_idx=2) if shared else causal

    def forward(self, handed: Handed) -> Handed:
        value, *balance = handed
        parts = self.qkv(self.norm(value)).chunk(3, -1)
        heads = (part.unflatten(-1, (2, WIDTH // 2)).transpose(1, 2) for part in parts)
        return value + self.out(self.attend(*heads).transpose(1, 2).flatten(2)), *balance


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, handed: Handed) -> Handed:
        value, *balance = handed
        return self.norm(value + self.down(nn.functional.gelu(self.up(value)))), *balance


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe = MoE(WIDTH, ExpertMLP(WIDTH, 32, "gelu"), 4, k=1, drop_tokens=False, use_rts=False)

    def forward(self, handed: Handed) -> Handed:
        value, balance = handed
        mixture, aux_loss, _ = self.moe(value)
        return value + mixture, balance + aux_loss


class Words(nn.Embedding):
    """First layer: embeddings, and a load-balancing loss of 0."""

    def forward(self, tokens: Tensor) -> Handed:
        return super().forward(tokens), torch.zeros(())


class Scores(nn.Linear):
    def forward(self, handed: Handed) -> Handed:  # type: ignore[override]
        value, *balance = handed
        return super().forward(value), *balance


@attrs.frozen
class Pair:
    """A way to split a stage, and its config."""

    section: dict[str, Any]  # for two ranks; {} for one
    sequence: int = 1
    has_experts: bool = False
    replicas: int = 1  # of four ranks
    balance: float = 0.0  # weight of the load-balancing loss
    partition: str = "uniform"  # number of layers at which both stages have experts


SPECS = [
    {"patterns": [r".*\.up\.weight$"], "partition_type": "column"},
    {"patterns": [r".*\.down\.weight$"], "partition_type": "row"},
]
EXPERTS = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
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
    "expert": Pair(EXPERTS, has_experts=True, replicas=2, balance=0.1),
    "sequence and expert": Pair(
        {"sequence_parallel_size": 2, **EXPERTS}, sequence=2, has_experts=True, partition="type:mixture|mlp|scores"
    ),
}
INFERRED = Pair({"tensor_parallel": {"autotp_size": 2}})


def model_of(pair: Pair, num_stages: int, groups: zcomm.Groups, *, sparse: bool) -> PipelineModule:
    group, shared = groups.sequence(), pair.sequence > 1
    attention = LayerSpec(Attention, group, shared=shared)
    block = [attention, LayerSpec(Mixture) if pair.has_experts else LayerSpec(Mlp)]
    layers = [
        LayerSpec(Words, TOKENS, WIDTH, sparse=sparse),
        *block,
        *block,
        LayerSpec(Mlp),
        LayerSpec(Scores, WIDTH, TOKENS),
    ]

    def loss(handed: Handed, labels: Tensor) -> Tensor:
        logits, balance = handed
        return sequence_cross_entropy(logits, labels, group) + pair.balance * balance

    return PipelineModule(layers, num_stages, loss_fn=loss, partition_method=pair.partition)


def mine(step: int, engine: zengine.PipelineEngine, own: Split) -> Any:
    """This rank's part of its replica's micro-batches."""
    groups, generator = engine.parts.groups, torch.Generator().manual_seed(step)
    each, size = engine.micro_batches, (MICRO_BATCH, TIME)
    draw = lambda: [torch.randint(TOKENS, size, generator=generator) for _ in "xy"]  # noqa: E731
    every = [draw() for _ in range(each * groups.get_data_parallel_world_size())]
    first = each * groups.get_data_parallel_rank()
    return iter([[own.take(part) for part in both] for both in every[first : first + each]])


def train(pair: Pair, num_stages: int, cells: list[tuple[int, int]]) -> dict[tuple[int, int], list[float]]:
    """Return loss and norm of each step, and of an evaluation, by ZeRO stage and accumulation."""
    found = {}
    for stage, accumulation in cells:
        groups = zcomm.Groups.of(zcomm.Degrees(pipeline=num_stages, sequence=pair.sequence))
        torch.manual_seed(0)
        sparse, own = num_stages > 1 < accumulation, Split(pair.sequence, groups.get_sequence_parallel_rank())
        model = model_of(pair, num_stages, groups, sparse=sparse)
        section = {**pair.section, "sparse_gradients": sparse} if num_stages > 1 else {}
        given = config(stage, accumulation, gradient_clipping=CLIP, **section)
        engine = zengine.initialize(model=model, config=given)[0]
        with engine:
            has_experts = any(isinstance(part, Mixture) for part in model.modules())
            assert bool(expert_shards_of(model)) == (num_stages > 1 and has_experts)
            travels_as_rows = any(bucket.is_sparse for bucket in engine.parts.partition.layout.buckets)
            assert travels_as_rows == (sparse and engine.is_first_stage())
            numbers: list[float] = []
            for step in range(STEPS):
                engine.train_batch(mine(step, engine, own))
                numbers += [engine.last_report.loss, engine.last_report.grad_norm]
            found[stage, accumulation] = [*numbers, engine.eval_batch(mine(99, engine, own)).item()]
    return found


@pytest.mark.parametrize("name", PAIRS)
def test_split_stages_have_the_curves_of_one_process(name: str) -> None:
    pair = PAIRS[name]
    (expected,) = run_ranks(train, 1, attrs.evolve(pair, sequence=1), 1, [(0, pair.replicas), (0, 4 * pair.replicas)])
    assert min(norm for numbers in expected.values() for norm in numbers[1:-1:2]) > CLIP  # clips
    for found in run_ranks(train, 4, pair, 2, CELLS):
        for (stage, accumulation), numbers in found.items():
            alone = expected[0, pair.replicas * accumulation]
            assert numbers == pytest.approx(alone, rel=BOUND, abs=BOUND), (stage, accumulation)


def exported(pair: Pair, num_stages: int, stage: int, accumulation: int) -> dict[str, Tensor] | None:
    """Return rank 0's whole weights after a step."""
    groups = zcomm.Groups.of(zcomm.Degrees(pipeline=num_stages, sequence=pair.sequence))
    torch.manual_seed(0)
    model = model_of(pair, num_stages, groups, sparse=False)
    section = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **(pair.section if num_stages > 1 else {})}
    given = config(stage, accumulation, gradient_clipping=CLIP, **section)
    with zengine.initialize(model=model, config=given)[0] as engine:
        engine.train_batch(mine(0, engine, Split(1, 0)))
        return engine._consolidated_16bit_state_dict()


@pytest.mark.parametrize("name", ["tensor", "expert"])
def test_rank_0_exports_whole_weights_of_split_stages(name: str) -> None:
    pair = PAIRS[name]
    (expected,) = run_ranks(exported, 1, pair, 1, 0, 2 * pair.replicas)
    for stage in (0, 3):
        found, *others = run_ranks(exported, 4, pair, 2, stage, 2)
        assert others == [None] * 3
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=BOUND, atol=BOUND)


def test_a_split_stage_needs_explicit_tensor_parallel_specs() -> None:
    with pytest.raises(RankFailed, match="tensor_parallel of a PipelineModule: the split of its layers"):
        run_ranks(train, 4, INFERRED, 2, [(0, 1)])


def in_parts(section: dict[str, bool]) -> tuple[dict[tuple[int, int], list[float]], set[str], int]:
    """Curves, labels of the collectives over tensor ranks, and elements that this rank sends to other stages."""
    base, sent, post = PAIRS["tensor"], [0], Channels._launch
    pair = attrs.evolve(base, section={**base.section, "pipeline": section})

    def counted(self: Channels, leaving: Sequence[tuple[Tensor, int]], coming: Any) -> None:
        data = [each for each, _ in leaving if each.is_floating_point() and each.dim() > 0]  # no load-balancing loss
        sent[0] += sum(each.numel() for each in data)
        post(self, leaving, coming)

    with pytest.MonkeyPatch.context() as patch, zcomm.traced([]) as records:
        patch.setattr(Channels, "_launch", counted)
        curves = train(pair, 2, [(0, 4), (3, 1)])
    return curves, {each.label for each in records if "between stages" in each.label}, sent[0]


def test_tensor_ranks_share_the_messages_between_stages_with_the_same_bits() -> None:
    whole = run_ranks(in_parts, 4, {})
    half = run_ranks(in_parts, 4, {"pipe_partitioned": True, "grad_partitioned": True})
    first = run_ranks(in_parts, 4, {"pipe_partitioned": True})
    for rank, (curves, labels, sent) in enumerate(whole):
        assert not labels
        assert half[rank][0] == first[rank][0] == curves
        assert half[rank][1] >= {"parts of a message between stages"}
        assert half[rank][2] == sent / 2
        assert first[rank][2] == (sent / 2 if rank < 2 else sent), "ranks 2 and 3 send gradients"
