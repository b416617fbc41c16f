"""Elastic batch sizes: DeepSpeed's golden values, properties, and the section of a config."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zengine.config import ConfigError, Facts, Plan, load, resolve
from zengine.config.plan.elastic import ElasticTerms, NoElasticBatch, solve_elastic

V1 = {"version": 0.1}
HOSTS = {"ranks_per_host": 8}
# terms, replicas -> batch, number of worlds, first worlds, micro-batch (values of DeepSpeed 0.16)
GOLDEN: list[tuple[dict[str, Any], int, int, int, list[int], int]] = [
    ({"max_batch": 2000, "micro_batches": (2, 4, 6), **V1}, 1, 1680, 32, [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 15], 6),
    ({"max_batch": 10000, "micro_batches": (2, 4, 6), **V1}, 1, 8640, 48, [1, 2, 3, 4, 5, 6, 8, 9], 6),
    (
        {"max_batch": 10000, "micro_batches": (8, 12, 16, 17), "min_ranks": 32, "max_ranks": 1500, **V1},
        64,
        9792,
        23,
        [32, 34, 36, 48, 51, 64, 68, 72, 96, 102, 136, 144],
        17,
    ),
    ({"max_batch": 9999, "micro_batches": (1, 2, 3, 4), **V1}, 1, 7560, 64, [1, 2, 3, 4], 4),
    ({"max_batch": 64, "micro_batches": (4,), **V1}, 3, 48, 6, [1, 2, 3, 4, 6, 12], 4),
    (
        {"max_batch": 1024, "micro_batches": (4, 8, 16), "min_ranks": 4, "max_ranks": 64, **V1},
        4,
        960,
        14,
        [4, 5, 6, 8, 10, 12, 15, 16, 20, 24, 30, 40],
        16,
    ),
    ({"max_batch": 2000, "micro_batches": (2, 4, 6), **HOSTS}, 8, 1920, 16, [8, 16, 24, 32, 40, 48, 64, 80], 6),
    (
        {
            "max_batch": 2000,
            "micro_batches": (2, 4, 6),
            "model_parallel_size": 2,
            "min_ranks": 8,
            "max_ranks": 512,
            **HOSTS,
        },
        8,
        1920,
        17,
        [4, 8, 12, 16, 20, 24, 32, 40, 48, 60],
        6,
    ),
    (
        {"max_batch": 1024, "micro_batches": (4, 8), "min_ranks": 8, "max_ranks": 64, **HOSTS},
        24,
        768,
        6,
        [8, 16, 24, 32, 48, 64],
        8,
    ),
    ({"max_batch": 1024, "micro_batches": (4, 8), "min_ranks": 8, "max_ranks": 64, **HOSTS}, 40, 960, 1, [40], 8),
]


@pytest.mark.parametrize(("terms", "replicas", "batch", "count", "first", "micro"), GOLDEN)
def test_values_are_those_of_deepspeed(
    terms: dict[str, Any], replicas: int, batch: int, count: int, first: list[int], micro: int
) -> None:
    found = solve_elastic(ElasticTerms(**terms), replicas)
    assert (found.batch, len(found.replicas), list(found.replicas[: len(first)])) == (batch, count, first)
    assert found.micro_batch(replicas) == micro
    assert found.accumulation(replicas) * micro * replicas == batch


@given(
    micro=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    extra=st.integers(0, 5000),
    version=st.sampled_from([0.1, 0.2]),
    replicas=st.integers(1, 64),
    hosts=st.sampled_from([(1, 1), (8, 1), (8, 2)]),
)
def test_every_world_of_a_result_trains_the_batch_within_the_limits(
    micro: list[int], extra: int, version: float, replicas: int, hosts: tuple[int, int]
) -> None:
    terms = ElasticTerms(
        max_batch=max(micro) + extra,
        micro_batches=tuple(micro),
        version=version,
        ranks_per_host=hosts[0],
        model_parallel_size=hosts[1],
    )
    found = solve_elastic(terms, replicas)
    assert found.batch <= terms.max_batch
    for count in found.replicas:
        assert found.micro_batch(count) in micro
        assert found.micro_batch(count) * found.accumulation(count) * count == found.batch


def test_limits_that_nothing_fits_are_named() -> None:
    with pytest.raises(NoElasticBatch, match="at most the batch size 3; given are 4"):
        ElasticTerms(max_batch=3, micro_batches=(4,))
    with pytest.raises(NoElasticBatch, match="8 ranks per host are not divisible by the model-parallel size 3"):
        ElasticTerms(max_batch=30, micro_batches=(4,), ranks_per_host=8, model_parallel_size=3)
    nothing = solve_elastic(ElasticTerms(max_batch=64, micro_batches=(4,), min_ranks=100, version=0.1), 1)
    assert attrs.astuple(nothing) == (4, (), (4,))


SECTION = {"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6], "version": 0.1}


def plan_of(world: int = 4, section: dict[str, Any] | None = None, **source: Any) -> Plan:
    config = load({"elasticity": {**SECTION, **(section or {})}, **source})
    return resolve(config, Facts(world_size=world, replicas=world))


def test_a_config_gets_the_same_batch_at_every_world() -> None:
    for world, micro, accumulation in ((1, 6, 280), (4, 6, 70), (8, 6, 35), (16, 0, 0), (20, 6, 14), (420, 4, 1)):
        if not micro:
            continue
        batch = plan_of(world).batch
        assert (batch.train_batch_size, batch.micro_batch_size, batch.accumulation) == (1680, micro, accumulation)
    assert plan_of(4).get("elasticity")["max_train_batch_size"] == 2000


def test_tensor_parallel_ranks_are_one_replica() -> None:
    section = {"version": 0.2, "num_gpus_per_node": 8, "model_parallel_size": 2, "min_gpus": 8, "max_gpus": 512}
    config = load({"elasticity": {**SECTION, **section}, "tensor_parallel": {"autotp_size": 2}})
    batch = resolve(config, Facts(world_size=8, replicas=8)).batch
    assert (batch.train_batch_size, batch.micro_batch_size, batch.accumulation, batch.replicas) == (1920, 6, 80, 4)


@pytest.mark.parametrize(
    ("world", "section", "source", "message"),
    [
        (
            11,
            {"max_gpus": 10},
            {},
            r"11 replicas cannot train a batch of 1680 .* equal, because 11 ranks are not within 1 \(min_gpus\) and "
            r"10 \(max_gpus\)\. Start 10 replicas; all that can: 1, 2, 3",
        ),
        (
            11,
            {},
            {"pipeline": {"stages": 1}, "managed_gradient_accumulation": False},
            r"because managed_gradient_accumulation is off\. Start 10 or 12 replicas",
        ),
        (
            8,
            {"version": 0.2, "num_gpus_per_node": 8, "model_parallel_size": 4},
            {"tensor_parallel": {"autotp_size": 2}},
            r"elasticity.model_parallel_size = 4: one replica of this config has 2 ranks \(tensor 2\)\. Set it to 2",
        ),
        (
            8,
            {"version": 0.2, "num_gpus_per_node": 8, "model_parallel_size": 2},
            {},
            r"one replica of this config has 1 rank \(no key splits the model or its sequences\)\. Set it to 1",
        ),
        (4, {"max_train_batch_size": 0}, {}, "elasticity: max_train_batch_size is missing. Add"),
        (4, {"min_gpus": 9, "max_gpus": 3}, {}, "min_gpus = 9: it exceeds max_gpus"),
        (4, {"model_parallel_size": 2}, {}, "version 0.1 counts ranks. Use version 0.2"),
        (
            4,
            {"max_train_batch_size": 5},
            {},
            r"micro_batch_sizes = \[2, 4, 6\]: every micro-batch size must be at most",
        ),
        (
            4,
            {},
            {"train_batch_size": 8},
            "train_batch_size = 8: elasticity chooses the batch sizes. Remove train_batch_size, or set "
            "elasticity.ignore_non_elastic_batch_info to true",
        ),
    ],
)
def test_a_wrong_section_says_what_to_write(
    world: int, section: dict[str, Any], source: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(world, section, **source)


def test_a_batch_of_one_world_alone_is_told() -> None:
    section = {"max_train_batch_size": 1024, "micro_batch_sizes": [4, 8], "version": 0.2, "num_gpus_per_node": 8}
    alone, one_of_many = plan_of(40, {**section, "max_gpus": 39}), plan_of(24, {**section, "max_gpus": 64})
    assert (alone.batch.train_batch_size, one_of_many.batch.train_batch_size) == (960, 768)
    told = [any("960 samples are the batch of this world alone" in note for note in alone.notices)]
    assert [*told, any("of this world alone" in note for note in one_of_many.notices)] == [True, False]


def test_a_world_that_does_not_divide_the_batch_keeps_it_in_uneven_shares() -> None:
    section = {"max_train_batch_size": 1024, "micro_batch_sizes": [4, 8], "version": 0.2, "num_gpus_per_node": 8}
    plan = plan_of(40, {**section, "max_gpus": 64})
    batch = plan.batch
    assert (batch.train_batch_size, batch.micro_batch_size, batch.accumulation) == (768, 7, 3)
    (step,) = batch.uneven
    assert step.factors(0) == pytest.approx([6 * 40 / 768] * 3)
    assert any("40 replicas do not divide the batch of 768 samples" in notice for notice in plan.notices)
    assert plan_of(24, {**section, "max_gpus": 64}).batch.uneven == ()
    for world in range(1, 60):
        assert plan_of(world).batch.train_batch_size == 1680


def test_overridden_batch_sizes_are_told() -> None:
    plan = plan_of(4, {"ignore_non_elastic_batch_info": True}, train_batch_size=8)
    assert plan.batch.train_batch_size == 1680
    assert any("train_batch_size has no effect here: elasticity chooses it" in notice for notice in plan.notices)
