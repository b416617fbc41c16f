"""Grids of ranks, by DeepSpeed's names."""

from __future__ import annotations

import pytest

from zcomm import Degrees, Groups
from zcomm.groups.topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology


def test_the_last_axis_changes_fastest() -> None:
    grid = ProcessTopology(["pipe", "data"], [2, 4])
    assert grid.get_rank(pipe=1, data=0) == 4
    assert grid.get_coord(5) == (1, 1)
    assert grid.get_coord(5).data == 1
    assert (grid.get_dim("pipe"), grid.get_dim("model"), grid.world_size()) == (2, 0, 8)
    assert grid.get_axis_names() == ["pipe", "data"]
    assert grid.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert grid.get_axis_comm_lists("model") == []
    assert grid.get_axis_list("pipe", 1) == grid.filter_match(pipe=1) == [4, 5, 6, 7]
    assert str(grid) == "pipe=2 x data=4"


def test_points_name_files() -> None:
    grid = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
    assert [grid.get_rank_repr(rank) for rank in range(2)] == ["model_00", "model_01"]
    assert grid.get_rank_repr(3, omit_axes=["data"], inner_sep="", outer_sep="+") == "pipe01+model01"


@pytest.mark.parametrize(("pipeline", "data", "tensor"), [(2, 3, 1), (2, 2, 2), (1, 4, 2)])
def test_groups_lie_on_the_same_grid(pipeline: int, data: int, tensor: int) -> None:
    grid = PipeModelDataParallelTopology(pipeline, tensor, data)
    if tensor == 1:
        assert PipeDataParallelTopology(pipeline, data).get_axis_comm_lists("pipe") == grid.get_axis_comm_lists(
            "pipe"
        )
    degrees = Degrees(pipeline=pipeline, tensor=tensor)
    for axis, name in (("pipe", "pipeline"), ("data", "shard"), ("model", "tensor")):
        every = [Groups.of(degrees, grid.world_size(), rank).ranks(name) for rank in range(grid.world_size())]
        assert {tuple(ranks) for ranks in grid.get_axis_comm_lists(axis)} == set(every)


def test_mistakes_are_named() -> None:
    grid = PipeDataParallelTopology(2, 2)
    for act, message in (
        (lambda: grid.get_rank(pipe=1), "one number for each of pipe, data, got pipe"),
        (
            lambda: grid.get_rank(pipe=2, data=0),
            r"ProcessCoord\(pipe=2, data=0\) is outside of the grid pipe=2 x data",
        ),
        (lambda: grid.get_coord(4), "rank 4 is outside"),
        (lambda: ProcessTopology(["a", "a"], [1, 2]), r"got axes \['a', 'a'\] and sizes \[1, 2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            act()
