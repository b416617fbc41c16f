"""The order of launches in pipelines: played ranks, every schedule, alone and with tensor, sequence or expert ranks.

Gradients beside a backward have tests of their own (test_order.py): here every rank has all of them, so that all four
rules are examined.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import test_pipeline_pairs as pairs
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zcomm
from zengine.config import load
from zengine.ordering.check import check
from zengine.ordering.decisions import Script
from zengine.ordering.play import PlayedRun
from zpartition.pipeline import LayerSpec, PipelineModule, Schedule, TiedLayerSpec, p2p
from zpartition.pipeline.launch_order import Launch, launch_order
from zpartition.sequence import Split

ALONE = pairs.Pair({})
SPLITS = {
    "alone": ALONE,
    "tensor": attrs.evolve(
        pairs.PAIRS["tensor"],
        section={**pairs.PAIRS["tensor"].section, "pipeline": {"pipe_partitioned": True, "grad_partitioned": True}},
    ),
    "sequence": pairs.PAIRS["sequence"],
    "expert": pairs.PAIRS["expert"],
}
PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 1}  # stages of a rank
SEND = "zpartition/pipeline/channels.py _launch"


class Block(nn.Sequential):
    def __init__(self, pair: pairs.Pair, group: Any) -> None:
        attention = pairs.Attention(group, shared=pair.sequence > 1)
        super().__init__(attention, pairs.Mixture() if pair.has_experts else pairs.Mlp())


def as_logits(words: nn.Module, handed: pairs.Handed) -> pairs.Handed:
    value, *balance = handed
    return value @ words.weight.t(), *balance  # type: ignore[operator,union-attr,return-value]


def layers(pair: pairs.Pair, num_blocks: int, group: Any) -> list[Any]:
    """Return words, blocks and scores; the weights of words and scores are tied if no other ranks are beside."""
    table = pairs.TOKENS, pairs.WIDTH
    blocks = [LayerSpec(Block, pair, group) for _ in range(num_blocks)]
    if pair is not ALONE:
        return [LayerSpec(pairs.Words, *table), *blocks, LayerSpec(pairs.Scores, *reversed(table))]
    tied = [TiedLayerSpec("e", pairs.Words, *table, **more) for more in ({}, {"forward_fn": as_logits})]
    return [tied[0], *blocks, tied[1]]


def loss_of(handed: pairs.Handed, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(handed[0].flatten(0, 1), labels.flatten())


def pipeline(pair: pairs.Pair, schedule: str, ranks: int) -> PlayedRun:
    """Return a run of two batches and an evaluation; every message is sent with its shapes if no ranks are beside."""
    per_rank, is_alone = PER_RANK[schedule], pair is ALONE
    degrees = zcomm.Degrees(pipeline=ranks, sequence=pair.sequence)

    def make() -> nn.Module:
        made = layers(pair, ranks * per_rank, zcomm.Groups.of(degrees).sequence())
        options = {"stages_per_rank": per_rank, "dynamic_shape": is_alone, "partition_method": "type:block"}
        return PipelineModule(made, ranks, loss_fn=loss_of, **options)

    def batches(count: int) -> Iterator[list[Tensor]]:
        own = Split(pair.sequence, zcomm.Groups.of(degrees).get_sequence_parallel_rank())
        for _ in range(count):
            yield [own.take(torch.randint(pairs.TOKENS, (2, pairs.TIME))) for _ in "xy"]

    def train(engine: Any, step: int, draw: random.Random) -> None:
        engine.train_batch(batches(engine.micro_batches))
        if step:
            engine.eval_batch(batches(engine.micro_batches))

    asked = {**pair.section.get("pipeline", {}), "schedule": schedule}
    return PlayedRun(
        config=load(pairs.config(1, 8, **{**pair.section, "pipeline": asked})),
        make_model=make,
        make_batch=lambda size: None,
        world_size=ranks * (1 if is_alone else 2),
        train=train,
        script=Script(num_steps=2, misses=frozenset(), overflows=frozenset()),
    )


@pytest.fixture(autouse=True)
def _without_a_world() -> None:
    """End a world of one that another test has left open."""
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("schedule", PER_RANK)
def test_stages_launch_their_messages_in_one_order(schedule: str, ranks: int) -> None:
    found = check(pipeline(ALONE, schedule, ranks))
    assert found.is_settled
    assert not found.found, found.text()


@pytest.mark.parametrize(
    ("split", "schedule", "ranks"),
    [
        *(
            (split, schedule, ranks)
            for split in list(SPLITS)[1:]
            for schedule in ("1f1b", "interleaved")
            for ranks in (2, 4)
        ),
        ("tensor", "1f1b", 8),
    ],
)
def test_stages_that_are_split_otherwise_launch_in_one_order(split: str, schedule: str, ranks: int) -> None:
    found = check(pipeline(SPLITS[split], schedule, ranks))
    assert found.is_settled
    assert not found.found, found.text()


def test_two_stages_that_each_send_first_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def sends_first(schedule: Schedule) -> list[list[Launch]]:
        return [
            [
                Launch(launch.after, (message,))
                for launch in launches
                for message in sorted(launch.messages, key=lambda each: each.source != rank)
            ]
            for rank, launches in enumerate(launch_order(schedule))
        ]

    monkeypatch.setattr(p2p, "launch_order", sends_first)
    assert {each.key for each in check(pipeline(ALONE, "1f1b", 2)).found} == {("order", SEND, SEND)}
