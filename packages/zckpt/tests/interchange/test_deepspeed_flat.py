import math
import random

import pytest
import torch

from zckpt import CheckpointCorrupt
from zckpt.interchange.deepspeed_flat import Fragment, fragments_of_groups, fragments_of_parts, part_spans

GROUPS = [{"a": (3, 4), "s": (), "b": (5,)}, {"c": (7, 2)}, {}]


def gathered(fragments: list[Fragment], buffers: list[list[torch.Tensor]]) -> dict[str, list[float]]:
    """Every parameter out of the buffers, element by element; a hole is -1."""
    made: dict[str, list[float]] = {}
    for each in fragments:
        values = made.setdefault(each.name, [-1.0] * math.prod(each.shape))
        part = buffers[each.rank][each.group][each.start :]
        values[each.span[0] : each.span[1]] = part[: each.span[1] - each.span[0]].tolist()
    return made


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("paddings", [[], [[1, 0, 2], [3], []]])
def test_groups_laid_end_to_end_and_cut_come_apart_again(world_size: int, paddings: list[list[int]]) -> None:
    numbers = iter(range(1000))
    wanted: dict[str, list[float]] = {}
    buffers: list[list[torch.Tensor]] = [[] for _ in range(world_size)]
    for index, shapes in enumerate(GROUPS):
        flat: list[float] = []
        for place, (name, shape) in enumerate(shapes.items()):
            wanted[name] = [float(next(numbers)) for _ in range(math.prod(shape))]
            flat += wanted[name] + [-2.0] * (paddings[index][place] if paddings else 0)
        flat += [-3.0] * (-len(flat) % (2 * world_size))
        part = len(flat) // world_size
        for rank in range(world_size):
            buffers[rank].append(torch.tensor(flat[rank * part : (rank + 1) * part]))
    lengths = [[len(each) for each in mine] for mine in buffers]
    assert gathered(fragments_of_groups(GROUPS, lengths, paddings), buffers) == wanted


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("limit", [1, 4, 100])
def test_padded_parts_in_sub_groups_come_apart_again(world_size: int, limit: int) -> None:
    rng = random.Random(limit)
    wanted: dict[str, list[float]] = {}
    ranks: list[list[list[float]]] = [[] for _ in range(world_size)]
    for shapes in GROUPS:
        sub: list[list[float]] = [[] for _ in range(world_size)]
        for name, shape in shapes.items():
            wanted[name] = [rng.random() for _ in range(math.prod(shape))]
            part = -(-len(wanted[name]) // world_size)
            padded = wanted[name] + [-2.0] * (part * world_size - len(wanted[name]))
            for rank in range(world_size):
                sub[rank] += padded[rank * part : (rank + 1) * part]
            if len(sub[0]) >= limit:  # a sub-group is full
                for rank in range(world_size):
                    ranks[rank].append(sub[rank])
                sub = [[] for _ in range(world_size)]
        for rank in range(world_size if sub[0] else 0):
            ranks[rank].append(sub[rank])
    buffers = [[torch.tensor(each, dtype=torch.float64) for each in mine] for mine in ranks]
    lengths = [[len(each) for each in mine] for mine in buffers]
    assert gathered(fragments_of_parts(GROUPS, lengths), buffers) == wanted


def test_buffers_that_are_too_short_are_named() -> None:
    with pytest.raises(CheckpointCorrupt, match=r"parameter 'b' of shape \(5,\) ends at 18"):
        fragments_of_groups(GROUPS[:1], [[9], [8]], [])
    with pytest.raises(CheckpointCorrupt, match=r"parameter 'c' of shape \(7, 2\) needs 7 from 0"):
        fragments_of_parts(GROUPS, [[10], [10]])
    with pytest.raises(CheckpointCorrupt, match="files of different runs"):
        fragments_of_parts(GROUPS, [[10, 7], [10, 6]])


def test_parts_of_one_parameter_cover_it() -> None:
    assert part_spans(7, 3) == [(0, 3), (3, 6), (6, 7)]
    assert part_spans(2, 4) == [(0, 1), (1, 2), (2, 2), (2, 2)]
