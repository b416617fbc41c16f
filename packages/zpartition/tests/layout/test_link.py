"""The bucket size that follows from a measured link."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zcomm
from zcomm.shared import native
from zcomm.testing import run_ranks
from zpartition import BucketSizing, ZeroPolicy, plan, shard
from zpartition.layout.layout import derive_bucket_numel
from zpartition.layout.link import LinkSpeed, choose_bucket_numel

needs_extension = pytest.mark.skipif(bool(native.unavailable_reason()), reason=native.unavailable_reason())

NUMEL = 25_000_000


def test_a_link_is_the_line_through_two_messages() -> None:
    link = LinkSpeed.of((4_000, 0.0003), (1_004_000, 0.0083))
    assert link.bytes_per_s == pytest.approx(125e6)
    assert link.latency_s == pytest.approx(0.000268)
    assert LinkSpeed.of((4_000, 0.002), (1_004_000, 0.001)).latency_s > 0, "times that make no sense make a link"


def test_the_chosen_size_is_the_best_of_all_sizes() -> None:
    link = LinkSpeed(0.0002, 125e6)

    def exposed_s(numel: int) -> float:
        """Time of the last message, and what all messages cost beside their bytes."""
        return (link.latency_s + 0.0005) * (1 + NUMEL / numel) + 4 * numel / link.bytes_per_s

    chosen = choose_bucket_numel(NUMEL, 4, link, 2)
    assert exposed_s(chosen) <= min(exposed_s(chosen * 9 // 10), exposed_s(chosen * 11 // 10))
    assert chosen < derive_bucket_numel(NUMEL) / 2


@pytest.mark.parametrize(("latency_s", "bytes_per_s"), [(1e-6, 1e6), (1e-4, 1e8), (0.1, 1e11)])
@pytest.mark.parametrize("numel", [1, 100_000, NUMEL, 7_000_000_000])
@pytest.mark.parametrize("world_size", [2, 64, 1024])
def test_it_never_exceeds_the_derived_one(latency_s: float, bytes_per_s: float, numel: int, world_size: int) -> None:
    chosen = choose_bucket_numel(numel, 2, LinkSpeed(latency_s, bytes_per_s), world_size)
    assert 1 <= chosen <= derive_bucket_numel(numel)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(20)))  # 5.2 million parameters


def rank_shards(hosts: str, stage: int, bucket_numel: int) -> tuple[int, int, int]:
    """(chosen size, bytes of buffers after a step, bytes that were planned)."""
    os.environ["ZCOMM_HOST"] = hosts[dist.get_rank()]
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    policy = ZeroPolicy(stage=stage, bucket_numel=bucket_numel, bucket_sizing=BucketSizing.MEASURED)
    planned = plan(module, policy=policy, world_size=zcomm.group_size())
    partition = shard(module, optimizer, policy=policy)
    with partition.reducer.round(is_last=True):
        module(torch.ones(1, 512)).sum().backward()
    partition.reducer.finish()
    found = partition.policy.bucket_numel, partition.ledger()["buckets"], planned.buckets
    partition.close()
    return found


@needs_extension
@pytest.mark.parametrize("stage", [1, 2])
def test_ranks_on_several_hosts_choose_one_size_within_the_planned_memory(stage: int) -> None:
    (first, *sizes), second = run_ranks(rank_shards, 2, "AB", stage, 0)
    assert first == second[0]
    assert 1 << 17 <= first <= derive_bucket_numel(20 * 513 * 512)
    assert sizes[0] <= sizes[1] * 65 / 64


@needs_extension
@pytest.mark.parametrize(("hosts", "bucket_numel"), [("AA", 0), ("AB", 300_000)])
def test_nothing_is_measured_inside_a_host_or_with_a_size(hosts: str, bucket_numel: int) -> None:
    assert [found[0] for found in run_ranks(rank_shards, 2, hosts, 1, bucket_numel)] == [bucket_numel] * 2
