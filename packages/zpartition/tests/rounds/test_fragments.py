"""Fragments cover every element once, hold layers in strides, and are equally large."""

from __future__ import annotations

import pytest
import torch

from zpartition.layout.layout import ParamSpec, plan_layout
from zpartition.rounds.fragments import Segment, plan_fragments

SHAPES = {
    "embed.weight": (31, 8),
    **{f"blocks.{layer}.{part}": (8, 8) for layer in range(5) for part in ("up.weight", "down.weight")},
    "head.weight": (7, 3),
}


def fragments(num_fragments: int, num_shards: int, rank: int) -> list[tuple[Segment, ...]]:
    specs = [ParamSpec(name, shape, torch.float32) for name, shape in SHAPES.items()]
    layout = plan_layout(specs, bucket_numel=300, world_size=num_shards, num_shards=num_shards)
    pieces = [tuple(bucket.pieces(rank)) for bucket in layout.buckets]
    return list(plan_fragments(pieces, tuple(SHAPES), num_fragments))


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("num_fragments", [1, 2, 3, 7])
def test_each_element_is_in_one_fragment(num_fragments: int, num_shards: int) -> None:
    seen = {name: torch.zeros(torch.Size(shape).numel(), dtype=torch.int) for name, shape in SHAPES.items()}
    for rank in range(num_shards):
        for own in fragments(num_fragments, num_shards, rank):
            end = 0
            for segment in own:
                seen[segment.piece.slot.name][slice(*segment.piece.span)] += 1
                assert segment.place == slice(end, end + segment.numel)
                end += segment.numel
    assert all(bool((counts == 1).all()) for counts in seen.values())


def test_layers_lie_in_strides_and_the_rest_is_cut_evenly() -> None:
    first, second = fragments(2, 1, 0)
    spans = [{segment.piece.slot.name: segment.piece.span for segment in own} for own in (first, second)]
    assert [name in spans[0] for name in (f"blocks.{layer}.up.weight" for layer in range(4))] == [True, False] * 2
    assert [own["embed.weight"] for own in spans] == [(0, 124), (124, 248)]
    assert [own["blocks.4.up.weight"] for own in spans] == [(0, 32), (32, 64)]


@pytest.mark.parametrize("num_fragments", [2, 3, 5])
def test_fragments_are_equally_large(num_fragments: int) -> None:
    sizes = [sum(segment.numel for segment in own) for own in fragments(num_fragments, 1, 0)]
    assert max(sizes) - min(sizes) <= len(SHAPES)


def test_segments_point_to_their_elements_of_the_master() -> None:
    specs = [ParamSpec(name, shape, torch.float32) for name, shape in SHAPES.items()]
    layout = plan_layout(specs, bucket_numel=300, world_size=1, num_shards=1)
    for own in fragments(3, 1, 0):
        for segment in own:
            slot = segment.piece.slot
            assert slot in layout.buckets[segment.storage].slots
            assert segment.start == slot.offset + segment.piece.span[0]
