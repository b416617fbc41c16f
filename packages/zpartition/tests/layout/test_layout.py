"""Layouts: coverage, balance, order; pure."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zpartition.layout.layout import SLOT_ALIGNMENT, SPAN_ALIGNMENT, ParamSpec, derive_bucket_numel, plan_layout

shapes = st.lists(st.integers(0, 40), min_size=0, max_size=3).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
spec_lists = st.lists(st.tuples(shapes, dtypes, st.integers(0, 2)), min_size=1, max_size=12).map(
    lambda rows: [ParamSpec(f"p{i}", shape, dtype, group) for i, (shape, dtype, group) in enumerate(rows)]
)


@given(spec_lists, st.integers(1, 5), st.booleans(), st.integers(1, 5000))
@settings(max_examples=100, deadline=None)
def test_the_pieces_of_all_owners_tile_every_parameter_exactly(specs, world_size, sharded, bucket_numel):
    layout = plan_layout(
        specs, world_size=world_size, num_shards=world_size if sharded else 1, bucket_numel=bucket_numel
    )
    spans = {spec.name: [] for spec in specs}
    for rank in range(layout.num_shards):
        for bucket in layout.buckets:
            for piece in bucket.pieces(rank):
                spans[piece.slot.name].append(piece.span)
                lo, _ = bucket.span(rank)
                assert lo + piece.offset == piece.slot.offset + piece.span[0]
    for spec in specs:
        pieces = sorted(spans[spec.name])
        assert pieces[0][0] == 0
        assert pieces[-1][1] == spec.numel
        assert all(left[1] == right[0] for left, right in itertools.pairwise(pieces))


@given(spec_lists, st.integers(1, 5), st.integers(1, 5000))
@settings(max_examples=60, deadline=None)
def test_buckets_hold_one_dtype_and_group_and_are_aligned(specs, world_size, bucket_numel):
    layout = plan_layout(specs, world_size=world_size, num_shards=world_size, bucket_numel=bucket_numel)
    by_name = {spec.name: spec for spec in specs}
    assert layout.numel == sum(spec.numel for spec in specs)
    assert [bucket.index for bucket in layout.buckets] == list(range(len(layout.buckets)))
    for bucket in layout.buckets:
        held = {(by_name[slot.name].dtype, by_name[slot.name].group) for slot in bucket.slots}
        assert held == {(bucket.dtype, bucket.group)}
        assert all(slot.offset % SLOT_ALIGNMENT == 0 for slot in bucket.slots)
        assert bucket.span_numel % SPAN_ALIGNMENT == 0
        assert bucket.span_numel * world_size == bucket.numel
        used = sum(slot.numel for slot in bucket.slots)
        assert used <= bucket_numel or len(bucket.slots) == 1
        assert sum(hi - lo for lo, hi in bucket.gaps()) == bucket.numel - used


def test_sharding_changes_ownership_only_so_that_stages_sum_the_same_blocks():
    specs = [ParamSpec(f"p{i}", (i + 1, 700), torch.float32) for i in range(6)]
    whole = plan_layout(specs, world_size=4, num_shards=1, bucket_numel=3000)
    cut = plan_layout(specs, world_size=4, num_shards=4, bucket_numel=3000)
    assert [(b.slots, b.numel) for b in whole.buckets] == [(b.slots, b.numel) for b in cut.buckets]
    assert whole.buckets[0].span(3) == (0, whole.buckets[0].numel)
    assert cut.shard_numel * 4 == cut.padded_numel == whole.shard_numel


def test_buckets_follow_the_reverse_of_registration():
    specs = [ParamSpec(name, (1000,), torch.float32) for name in ("embed", "block", "head")]
    layout = plan_layout(specs, world_size=1, num_shards=1, bucket_numel=1000)
    assert [bucket.slots[0].name for bucket in layout.buckets] == ["head", "block", "embed"]


def test_a_bucket_that_waits_for_an_early_parameter_is_sent_late():
    rows = [("a", 0), ("b", 1), ("c", 1), ("d", 0)]
    specs = [ParamSpec(name, (100,), torch.float32, group) for name, group in rows]
    layout = plan_layout(specs, world_size=1, num_shards=1, bucket_numel=1000)
    assert [[slot.name for slot in bucket.slots] for bucket in layout.buckets] == [["c", "b"], ["d", "a"]]


def test_a_parameter_larger_than_the_bucket_has_its_own():
    specs = [ParamSpec(n, (size,), torch.float32) for n, size in (("a", 10), ("big", 9000), ("z", 10))]
    layout = plan_layout(specs, world_size=2, num_shards=2, bucket_numel=500)
    assert [[slot.name for slot in bucket.slots] for bucket in layout.buckets] == [["z"], ["big"], ["a"]]


def test_equal_names_are_rejected_by_name():
    with pytest.raises(ValueError, match="unique; repeated: w"):
        plan_layout([ParamSpec("w", (1,), torch.float32)] * 2, world_size=1, num_shards=1)


def test_a_number_of_shards_that_does_not_divide_the_world_is_rejected():
    with pytest.raises(ValueError, match=r"must divide world_size \(4\), got 3"):
        plan_layout([ParamSpec("w", (1,), torch.float32)], world_size=4, num_shards=3)


def test_the_derived_bucket_follows_the_model_within_bounds():
    assert derive_bucket_numel(1000) == 2**18
    assert derive_bucket_numel(124_000_000) == 15_500_000
    assert derive_bucket_numel(70_000_000_000) == 2**25


def test_a_layout_of_a_70b_model_is_planned_without_memory():
    specs = [ParamSpec(f"blocks.{i}.w", (8192, 28672), torch.bfloat16) for i in range(300)]
    layout = plan_layout(specs, world_size=64, num_shards=64)
    assert layout.numel == 300 * 8192 * 28672
    assert layout.shard_numel * 64 == layout.padded_numel


def test_what_is_dealt_out_has_buckets_of_its_own_cut_over_its_holders() -> None:
    specs = [ParamSpec("a", (64,), torch.float32), ParamSpec("experts", (4, 64), torch.float32, num_expert_shards=2)]
    layout = plan_layout(specs, world_size=4, num_shards=4)
    assert layout.is_expert_sharded
    own, shared = (
        next(b for b in layout.buckets if b.num_expert_shards == num_expert_shards) for num_expert_shards in (2, 1)
    )
    assert (own.num_shards, shared.num_shards) == (2, 4)
    assert [own.span(rank)[0] // own.span_numel for rank in range(4)] == [0, 0, 1, 1]  # rank 0 and 2 hold the same
    assert [shared.span(rank)[0] // shared.span_numel for rank in range(4)] == [0, 1, 2, 3]
    assert not plan_layout(specs[:1], world_size=4, num_shards=4).is_expert_sharded
    whole = plan_layout(specs, world_size=4, num_shards=1)
    assert {bucket.num_shards for bucket in whole.buckets} == {1}


def test_ranks_of_one_copy_must_hold_all_experts() -> None:
    spec = ParamSpec("experts", (4, 64), torch.float32, num_expert_shards=4)
    with pytest.raises(
        ValueError, match="experts is sharded over 4 expert-parallel ranks, which do not divide the 2 ranks"
    ):
        plan_layout([spec], world_size=4, num_shards=2)
