"""Named axes: sizes by arithmetic, groups on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zcomm
from zcomm.groups.mesh import resolve_sizes
from zcomm.testing import run_ranks


@pytest.mark.parametrize(
    ("axes", "world_size", "sizes"),
    [
        ({"shard": -1}, 4, [4]),
        ({"replicate": 2, "shard": -1}, 8, [2, 4]),
        ({"replicate": -1, "shard": 8}, 8, [1, 8]),
        ({"a": 1, "b": 2, "c": 3}, 6, [1, 2, 3]),
    ],
)
def test_sizes_multiply_to_the_world(axes: dict[str, int], world_size: int, sizes: list[int]) -> None:
    assert list(resolve_sizes(axes, world_size).values()) == sizes


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"replicate": 2, "shard": 3}, "replicate=2 x shard=3 does not hold: 6 is not the world size 4"),
        ({"replicate": 3, "shard": -1}, "replicate=3 x shard=-1 does not hold: 3 must divide the world size 4"),
        ({"replicate": 8, "shard": -1}, "8 must divide the world size 4"),
        ({"a": -1, "b": -1}, "only one axis may be -1, got a and b"),
        ({"a": 0}, "mesh axis a=0 must be a positive whole number"),
        ({"a": True}, "mesh axis a=True must be"),
        ({"a": 2.0}, "mesh axis a=2.0 must be"),
        ({}, "at least one axis"),
    ],
)
def test_sizes_that_do_not_fit_print_the_equation(axes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_sizes(axes, 4)


def test_a_mesh_needs_a_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)  # whatever an earlier test left behind
    with pytest.raises(RuntimeError, match=r"call zcomm\.init\(\) first"):
        zcomm.make_mesh(shard=-1)


def test_a_world_of_one_has_a_mesh_too() -> None:
    with zcomm.init(environ={}, device="cpu"):
        mesh = zcomm.make_mesh(replicate=1, shard=-1)
        assert (zcomm.axis_size(mesh, "shard"), zcomm.axis_rank(mesh, "shard")) == (1, 0)
        assert zcomm.group_size(zcomm.axis_group(mesh, "replicate")) == 1


def rank_on_mesh() -> tuple[list[int], list[float]]:
    mesh = zcomm.make_mesh(replicate=2, shard=-1)
    sums = []
    for axis in ("replicate", "shard"):
        tensor = torch.tensor([10.0 ** torch.distributed.get_rank()])
        zcomm.all_reduce(tensor, zcomm.axis_group(mesh, axis))
        sums.append(tensor.item())
    return [zcomm.axis_rank(mesh, "replicate"), zcomm.axis_rank(mesh, "shard"), zcomm.axis_size(mesh, "shard")], sums


def test_the_last_axis_is_the_fastest_and_groups_differ_along_one_axis_only() -> None:
    assert run_ranks(rank_on_mesh, 4) == [
        ([0, 0, 2], [101.0, 11.0]),
        ([0, 1, 2], [1010.0, 11.0]),
        ([1, 0, 2], [101.0, 1100.0]),
        ([1, 1, 2], [1010.0, 1100.0]),
    ]


@pytest.mark.parametrize("verb", [zcomm.axis_group, zcomm.axis_size, zcomm.axis_rank])
def test_an_unknown_axis_is_answered_with_the_names(verb: Any) -> None:
    with zcomm.init(environ={}, device="cpu"):
        mesh = zcomm.make_mesh(replicate=1, shard=1)
        with pytest.raises(ValueError, match="no axis 'shrad'; its axes: 'replicate', 'shard'"):
            verb(mesh, "shrad")
