"""Degrees of parallelism: from the config and what the caller has laid out, or an error with the numbers."""

from __future__ import annotations

from typing import Any

import pytest

from zcomm import Degrees
from zengine.config import ConfigError, Facts, Plan, load, resolve

MESH = {"pipeline": 1, "replicate": 2, "shard": 2, "sequence": 1, "tensor": 2}


def plan_of(source: dict[str, Any], facts: Facts | None = None) -> Plan:
    return resolve(load({"train_micro_batch_size_per_gpu": 2, **source}), facts or Facts(world_size=8, replicas=8))


def test_tensor_ranks_share_a_copy_and_the_batch_counts_the_others() -> None:
    for source in ({"autotp_size": 2}, {"tp": {"tp_size": 2}}, {"autotp_size": 2, "tp": {"tp_size": 2}}):
        plan = plan_of({"tensor_parallel": source})
        assert plan.parallel.degrees == Degrees(shard=4, tensor=2)
        assert (plan.batch.replicas, plan.batch.train_batch_size) == (4, 8)
        assert (plan.parallel.data_ranks, plan.parallel.gradient_ranks, plan.parallel.model_parallel_size) == (
            4,
            4,
            2,
        )
        assert plan["tensor_parallel.autotp_size"] == plan["tensor_parallel.tp.tp_size"] == 2


def test_nothing_said_is_one_rank_a_copy() -> None:
    for source in ({}, {"tensor_parallel": {"autotp_size": 0}}, {"tensor_parallel": {"autotp_size": 1}}):
        assert plan_of(source).parallel.degrees == Degrees(shard=8)


def test_what_the_caller_has_laid_out_counts() -> None:
    split = Facts(world_size=8, replicas=4, axes={"tensor": 2}, axes_source="the model")
    assert plan_of({}, split).parallel.degrees == Degrees(shard=4, tensor=2)
    mesh = Facts(world_size=8, replicas=4, axes=MESH, axes_source="mesh=")
    plan = plan_of({"tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 2}}, mesh)
    assert plan.parallel.degrees == Degrees(replicate=2, shard=2, tensor=2)
    assert plan.zero.shard_group_size == 2  # the mesh's replicas hold one copy each


@pytest.mark.parametrize(
    ("source", "facts", "message"),
    [
        (
            {"tensor_parallel": {"autotp_size": 3}}, {},
            r"autotp_size = 3: one copy of the model takes pipeline 1 x sequence 1 x tensor 3 = 3 ranks, which does "
            r"not divide the 8 ranks of this run\. Choose one of 1, 2, 4, 8, or start a multiple of 3 ranks\.",
        ),
        (
            {"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 4}}}, {},
            r"autotp_size = 2 and tensor_parallel\.tp\.tp_size = 4 differ\. Keep one",
        ),
        (
            {"tensor_parallel": {"tp": {"tp_size": 4}}}, {"replicas": 4, "axes": MESH, "axes_source": "mesh="},
            r"tp_size = 4: mesh= has 2 tensor ranks for each copy\. Make it 2, or leave the key out: mesh= decides",
        ),
        (
            {"tensor_parallel": {"autotp_size": 2}, "data_parallel_size": 8}, {},
            r"data_parallel_size = 8: this run has 4 replicas \(world size 8\)",
        ),
        (
            {"tensor_parallel": {"autotp_size": 2}, "train_batch_size": 12}, {},
            r"train_batch_size 12 = micro 2 x replicas 4 x accumulation does not hold",
        ),
        (
            {"tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 1, "shard_group_size": 8}}, {},
            r"shard_group_size = 8: it does not divide the 4 ranks that share this model",
        ),
    ],
)  # fmt: skip
def test_products_that_do_not_hold_are_told_with_their_numbers(source: Any, facts: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(source, Facts(**{"world_size": 8, "replicas": 8, **facts}))
