"""Replica groups of diloco: their number from keys and mesh, and what they are not combined with."""

from __future__ import annotations

from typing import Any

import pytest

from zengine.config import ConfigError, Facts, Plan, load, resolve


def plan_of(world_size: int = 8, axes: dict[str, int] | None = None, **source: Any) -> Plan:
    facts = Facts(world_size=world_size, replicas=world_size, axes=axes or {}, axes_source="mesh=" if axes else "")
    return resolve(load({"train_micro_batch_size_per_gpu": 2, **source}), facts)


def diloco(**keys: Any) -> dict[str, Any]:
    return {"diloco": {"sync_every": 10, **keys}}


@pytest.mark.parametrize(
    ("source", "axes", "groups"),
    [
        (diloco(), {}, 8),
        (diloco(groups=2), {}, 2),
        ({**diloco(), "zero_optimization": {"stage": 3, "shard_group_size": 2}}, {}, 4),
        ({**diloco(groups=2), "zero_optimization": {"stage": 3, "shard_group_size": 2}}, {}, 2),
        ({**diloco(), "sequence_parallel_size": 2}, {}, 4),
        (diloco(), {"replicate": 2, "shard": 4}, 2),
    ],
)
def test_the_number_of_groups(source: dict[str, Any], axes: dict[str, int], groups: int) -> None:
    plan = plan_of(axes=axes, **source)
    assert plan.parallel.degrees.replicate == groups
    assert plan.parallel.independent_replicas
    assert plan.parallel.gradient_ranks == 8 // groups
    assert plan.parallel.sample_ranks == 8
    assert plan.batch.train_batch_size == 2 * plan.batch.replicas


def test_a_mesh_without_diloco_is_hybrid_sharding() -> None:
    plan = plan_of(axes={"replicate": 2, "shard": 4}, zero_optimization={"stage": 3})
    assert plan.zero.shard_group_size == 4
    assert plan.parallel.gradient_ranks == 8
    assert (
        plan_of(axes={"replicate": 2, "shard": 4}, zero_optimization={"stage": 3}, **diloco()).zero
        == plan_of(4, zero_optimization={"stage": 3}).zero
    )


@pytest.mark.parametrize(
    ("source", "axes", "message"),
    [
        (diloco(groups=3), {}, "groups = 3 does not divide the 8 replicas"),
        (diloco(groups=4), {"replicate": 2, "shard": 4}, "mesh= has 2 along `replicate`"),
        (
            {**diloco(), "zero_optimization": {"stage": 1, "shard_group_size": 3}},
            {},
            "Choose diloco.groups of 1, 2, 4, 8",
        ),
        (
            {**diloco(groups=4), "expert_parallel": {"enabled": True, "autoep_size": 4}},
            {},
            "a replica group of diloco has 2 ranks",
        ),
        (diloco(fragments=11), {}, "Use at most 10 fragments"),
        ({**diloco(), "hybrid_engine": {"enabled": True}}, {}, "the groups have different ones"),
        (
            {
                **diloco(),
                "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}},
            },
            {},
            "keeps the master weights on a drive",
        ),
        (
            {
                **diloco(start_step=5),
                "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "super_offload": True}},
            },
            {},
            "super_offload updates weights before all gradients",
        ),
    ],
)
def test_what_cannot_be_is_rejected(source: dict[str, Any], axes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(axes=axes, **source)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("source", "world_size", "message"),
    [
        (diloco(sync_delay=2), 8, "drop the local steps"),
        (diloco(), 1, "exchanges nothing; its outer step still moves the weights every 10 steps"),
        (diloco(quantize_bits=4), 1, "quantize_bits has no effect here"),
        (diloco(outer={"momentum": 0.0, "nesterov": True}), 8, "nesterov has no effect here"),
    ],
)
def test_notices(source: dict[str, Any], world_size: int, message: str) -> None:
    plan = plan_of(world_size, **source)
    assert any(message in notice for notice in plan.notices)
    quiet = plan_of(8, **diloco(sync_delay=2, merge_alpha=0.5, quantize_bits=4, outer={"momentum": 0.5}))
    assert not any("diloco" in notice for notice in quiet.notices)
