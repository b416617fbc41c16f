from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from zoptim import Segment


def test_a_segment_knows_its_size_and_its_elements() -> None:
    segment = Segment(10, (3, 4), 7)
    assert (segment.numel, segment.row, segment.index) == (12, slice(10, 22), 7)
    assert Segment(3, ()).numel == 1
    assert torch.arange(40)[segment.row].tolist() == list(range(10, 22))


def test_segments_are_frozen_values() -> None:
    assert Segment(0, (2, 3)) == Segment(0, (2, 3), 0)
    assert len({Segment(0, (2,)), Segment(0, (2,)), Segment(1, (2,))}) == 2
    with pytest.raises(AttributeError):
        Segment(0, (2,)).start = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    "segments",
    [[], [Segment(0, (10,))], [Segment(6, (4,)), Segment(0, (2, 3))], [Segment(0, (0, 3)), Segment(0, (5,))]],
    ids=len,
)
def test_disjoint_segments_inside_the_shard_pass_in_any_order(segments: Sequence[Segment]) -> None:
    Segment.check(segments, torch.zeros(10))


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        (
            [Segment(0, (2, 3)), Segment(5, (2,))],
            r"Segment\(start=5, shape=\(2,\), index=0, span=None\) begins before 6",
        ),
        (
            [Segment(0, (4,)), Segment(0, (4,))],
            "begins before 4, the end of the previous segment; segments must be disjoint",
        ),
        ([Segment(5, (2, 3))], "segments end at element 11; the shard has 10 elements"),
    ],
    ids=["overlap", "twice", "outside"],
)
def test_segments_that_do_not_fit_raise(segments: list[Segment], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Segment.check(segments, torch.zeros(10))


@pytest.mark.parametrize(
    "shard", [torch.zeros(2, 5), torch.zeros(20)[::2], torch.zeros(())], ids=["2-D", "gaps", "0-D"]
)
def test_a_shard_is_flat_and_contiguous(shard: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="segments need a flat contiguous tensor"):
        Segment.check([], shard)


@pytest.mark.parametrize(("start", "shape"), [(-1, (2,)), (0, (-2, 3)), (0, (-2, -3))], ids=str)
def test_negative_starts_and_sizes_raise(start: int, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"negative start or shape|begins before 0"):
        Segment.check([Segment(start, shape)], torch.zeros(10))
