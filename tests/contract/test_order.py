"""The order of launches over communicators, for every split and ZeRO stage: played ranks, adversarial decisions.

No communicators that ranks share may be used in an order that depends on data.  See ARCHITECTURE.md, "Order of
launches".
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import test_pipeline_pairs as pipelines
import test_tensor_pairs as words
import torch
import torch.distributed as dist
from torch import nn

import zcomm
from zengine.config import load
from zengine.ordering.check import Checked, check
from zengine.ordering.decisions import Script
from zengine.ordering.play import PlayedRun
from zpartition.sequence import SequenceBatches, Split

WORLD = 8

_BUCKETS = {"reduce_bucket_size": 400}
_STRICT = {
    **_BUCKETS,
    "stage": 3,
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_unit_size": 400,
}
ZEROS: dict[str, dict[str, Any]] = {
    "0": {"stage": 0, **_BUCKETS},
    "1": {"stage": 1, **_BUCKETS},
    "2": {"stage": 2, **_BUCKETS},
    "3": _STRICT,
    "hybrid": {**_STRICT, "shard_group_size": 4},
}
DEFAULT = Script()
WHOLE_FIRST = Script(misses=frozenset({1, 3}))  # the first step shows all positions; in later ones ranks differ
SHORT = Script(num_steps=3, misses=frozenset({1}))


def subject(zero: str, split: str, world: int = WORLD, *, skips: bool = False, script: Script = DEFAULT) -> PlayedRun:
    """Return a run of a small transformer, split by the letters t(ensor), s(equence), e(xperts).

    skips: in about half of the steps a replica skips a layer, on all its ranks.
    """
    given: dict[str, Any] = {"sequence_parallel_size": 2} if "s" in split else {}
    if "e" in split:
        given["expert_parallel"] = {"enabled": True, "autoep_size": 2}
    degrees = zcomm.Degrees(sequence=1 + ("s" in split), tensor=1 + ("t" in split))

    def group() -> Any:
        return zcomm.Groups.of(degrees).sequence()

    def make() -> nn.Module:
        attend = {"attend": words.ulysses(group()), "mean": words.mean_over(group())} if "s" in split else {}
        return words.Words(experts="e" in split, **attend)

    def train(engine: Any, step: int, draw: random.Random) -> None:
        cut = SequenceBatches.over([], group()) if "s" in split else SequenceBatches([], Split())
        tokens = torch.randint(0, words.TOKENS, (2, words.LENGTH))
        replica, blocks = engine.parts.groups.get_data_parallel_rank(), engine.module.blocks
        if skips and random.Random(f"step {step} replica {replica}").random() < 0.5:
            engine.module.blocks = blocks[:1]
        engine.backward(engine(**cut.piece({"input_ids": tokens, "labels": tokens})))
        engine.module.blocks = blocks
        engine.step()

    config = words.config(0, 1, **given)
    if "t" not in split:
        del config["tensor_parallel"]
    config["zero_optimization"] = {**config["zero_optimization"], **ZEROS[zero]}
    return PlayedRun(
        config=load(config), make_model=make, make_batch=no_batch, world_size=world, train=train, script=script
    )


def staged(zero: str, name: str) -> PlayedRun:
    """Return a run of two pipeline stages that are split otherwise, too."""
    pair = pipelines.PAIRS[name]

    def groups() -> zcomm.Groups:
        return zcomm.Groups.of(zcomm.Degrees(pipeline=2, sequence=pair.sequence))

    def train(engine: Any, step: int, draw: random.Random) -> None:
        own = Split(pair.sequence, groups().get_sequence_parallel_rank())
        both = [
            [own.take(torch.randint(pipelines.TOKENS, (2, 8))) for _ in "xy"] for _ in range(engine.micro_batches)
        ]
        engine.train_batch(iter(both))

    config = pipelines.config(0, 2, gradient_clipping=pipelines.CLIP, **pair.section)
    config["zero_optimization"] = dict(ZEROS[zero])
    return PlayedRun(
        config=load(config),
        make_model=lambda: pipelines.model_of(pair, 2, groups(), sparse=False),
        make_batch=no_batch,
        world_size=WORLD,
        train=train,
    )


def no_batch(size: int) -> Any:
    raise AssertionError("`train` makes its own batches")


CASES: dict[str, Callable[[], PlayedRun]] = {
    "0": lambda: subject("0", ""),
    "2": lambda: subject("2", ""),
    "3": lambda: subject("3", "", script=WHOLE_FIRST),
    "hybrid": lambda: subject("hybrid", ""),
    "hybrid, whole first": lambda: subject("hybrid", "", script=WHOLE_FIRST),
    "1, tensor": lambda: subject("1", "t"),
    "1, tensor, whole first": lambda: subject("1", "t", script=WHOLE_FIRST),
    "1, tensor, skipped layers": lambda: subject("1", "t", skips=True, script=WHOLE_FIRST),
    "1, tensor, 16 ranks": lambda: subject("1", "t", 16, script=SHORT),
    "3, tensor": lambda: subject("3", "t", script=WHOLE_FIRST),
    "0, sequence": lambda: subject("0", "s"),
    "2, sequence, skipped layers": lambda: subject("2", "s", skips=True, script=WHOLE_FIRST),
    "2, expert": lambda: subject("2", "e", script=WHOLE_FIRST),
    "hybrid, expert": lambda: subject("hybrid", "e", script=WHOLE_FIRST),
    "1, tensor and expert, skipped layers": lambda: subject("1", "te", skips=True, script=WHOLE_FIRST),
    "2, tensor and sequence": lambda: subject("2", "ts", script=WHOLE_FIRST),
    "3, sequence and expert": lambda: subject("3", "se"),
    "3, tensor and expert": lambda: subject("3", "te"),
    "2, pipeline and sequence": lambda: staged("2", "sequence"),
    "3, pipeline and expert": lambda: staged("3", "expert"),
}


@pytest.fixture(autouse=True)
def _without_a_world() -> None:
    """End a world of one that another test has left open."""
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("case", CASES)
def test_ranks_launch_in_one_order(case: str) -> None:
    found = check(CASES[case]())
    assert found.is_settled
    assert not found.found, found.text()


def planted(bad: int, buckets: tuple[int, int]) -> Callable[[Any, int, random.Random], None]:
    """Return a step in which rank `bad` sends two gradient buckets in the other order."""

    def train(engine: Any, step: int, draw: random.Random) -> None:
        reducer = engine.parts.partition.reducer
        if step == 1 and zcomm.group_rank() == bad:
            order, (first, second) = list(reducer.order), buckets
            order[first], order[second] = order[second], order[first]
            reducer.order = tuple(order)
        engine.backward(engine(torch.randn(2, 8)).square().mean())
        engine.step()

    return train


def small(train: Callable[[Any, int, random.Random], None], world: int) -> Checked:
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2, "reduce_bucket_size": 80}}
    return check(
        PlayedRun(
            config=load(config),
            make_model=lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))),
            make_batch=no_batch,
            world_size=world,
            train=train,
        )
    )


def test_a_swapped_pair_of_collectives_on_one_of_64_ranks_is_named() -> None:
    assert not small(planted(-1, (1, 2)), 8).found
    (found,) = small(planted(37, (1, 2)), 64).found
    assert (found.rule, found.ranks) == ("collectives", (0, 37))
    labels = [call.label for call in found.calls if call is not None]
    assert len(set(labels)) == 2
    assert all(label.startswith("gradients[") for label in labels)
    assert all("reduce.py" in call.line for call in found.calls if call is not None)
