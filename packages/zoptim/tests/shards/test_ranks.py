"""Cut tensors: owners, gather and scatter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from zoptim import Segment
from zoptim.shards.ranks import CutTensor, cut_tensors, gather_cut, own_segments, plan_owners, scatter_cut

SHAPES = [(6, 5), (4,), (10, 10), (3, 3), (2, 2)]


def by_numel(tensor: CutTensor) -> float:
    return float(tensor.numel)


@pytest.mark.parametrize("cuts", [[0], [0, 31, 60, 100], [0, 0, 140], [0, 147]], ids=str)
def test_tensors_are_gathered_by_their_owners_and_come_back(cuts: list[int], lab: Any, team: Any) -> None:
    crew = team(SHAPES, cuts)
    whole = [param.detach() for param in lab.make_params(SHAPES)]
    shards = crew.shards(whole)
    (owned,) = plan_owners([crew.segments()], by_numel, len(cuts))
    seen: dict[int, tuple[int, Tensor]] = {}
    back = [torch.zeros_like(shard) for shard in shards]

    def go(rank: int) -> None:
        ranks = _member(crew, rank)
        found = gather_cut(owned, ranks, lambda segment: shards[rank][segment.row], shards[rank])
        seen.update({index: (rank, flat) for index, flat in found.items()})
        doubled = {index: 2 * flat for index, flat in found.items()}
        for segment, part in scatter_cut(owned, ranks, doubled, shards[rank]):
            back[rank][segment.row] = part

    crew.together(go)
    assert sorted(seen) == list(range(len(SHAPES)))
    for index, (rank, flat) in seen.items():
        assert owned[index].owner == rank
        assert torch.equal(flat, whole[index].flatten())
    lab.assert_bitwise(back, [2 * shard for shard in shards])
    num_cut = sum(tensor.is_cut for tensor in owned.values())
    assert len(crew.exchanged) == (2 if num_cut else 0), "one message each way, none where nothing is cut"


def _member(crew: Any, rank: int) -> Any:
    found: list[Any] = []

    class Taker:
        def place_on_ranks(self, segments: Any, ranks: Any) -> None:
            found.append(ranks)

    crew.place_segments(rank, Taker(), torch.zeros(1))
    return found[0]


def test_whole_tensors_stay_and_others_go_to_the_least_loaded_rank(team: Any) -> None:
    crew = team([(10, 10), (8, 8), (6, 6)], [0, 150])  # the second is cut 50 to 14
    (owned,) = plan_owners([crew.segments()], by_numel, 2)
    assert [tensor.owner for tensor in owned.values()] == [0, 1, 1]
    (owned,) = plan_owners([team([(8, 8)], [0, 20]).segments()], by_numel, 2)
    assert owned[0].owner == 1, "of equals the one that holds most: least travels"


def test_owners_are_balanced_over_shards() -> None:
    def halves(index: int) -> list[list[Segment]]:
        return [[Segment(0, (4, 4), index, (0, 8))], [Segment(0, (4, 4), index, (8, 16))]]

    owned = plan_owners([halves(index) for index in range(6)], by_numel, 2)
    assert sorted(tensor.owner for tensors in owned for tensor in tensors.values()) == [0, 0, 0, 1, 1, 1]


def test_the_parts_of_a_tensor_are_in_the_order_of_ranks(team: Any) -> None:
    tensors = cut_tensors(team([(10,), (4,)], [0, 3, 12]).segments())
    assert [(rank, part.range) for rank, part in tensors[0].parts] == [(0, (0, 3)), (1, (3, 10))]
    assert [(rank, part.range) for rank, part in tensors[1].parts] == [(1, (0, 2)), (2, (2, 4))]
    assert tensors[0].is_cut
    assert not cut_tensors([[Segment(0, (4,), 3)], []])[3].is_cut


def test_segments_of_too_few_ranks_raise(team: Any) -> None:
    crew = team([(10,)], [0, 5])
    with pytest.raises(ValueError, match="a shard of 7 elements has segments of 1 ranks; there are 2"):
        own_segments({torch.zeros(7): [[]]}, _member(crew, 0))
    shard = torch.zeros(5)
    assert own_segments({shard: crew.segments()}, _member(crew, 1)) == {shard: (Segment(0, (10,), 0, (5, 10)),)}
