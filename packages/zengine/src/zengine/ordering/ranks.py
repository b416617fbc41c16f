"""Choice of the ranks to play.

Ranks in equal roles run the same program on other data.  A role is the pipeline stage, and being first, last or
between along every other axis.  One rank of each role is played, and a seeded sample in full: ranks with a neighbour
along each axis, so that every kind of group has at least two members that are played.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["ranks_to_play"]

ALL_UP_TO = 64  # ranks of a world that is played entirely
SAMPLE = 32  # ranks that are played whatever their role
_BY_STAGE = "pipeline"


def ranks_to_play(axes: Sequence[str], table: NDArray[np.int64], seed: int) -> list[int]:
    """Return ranks, ascending.

    axes, table: the layout of all ranks, as in `zcomm.Groups`.
    """
    if table.size <= ALL_UP_TO:
        return sorted(table.reshape(-1).tolist())
    roles: dict[tuple[int, ...], int] = {}
    for place in np.ndindex(*table.shape):
        roles.setdefault(_role(axes, table.shape, place), int(table[place]))
    return sorted({*roles.values(), *_sample(table, seed)})


def _role(axes: Sequence[str], shape: Sequence[int], place: Sequence[int]) -> tuple[int, ...]:
    return tuple(
        at if axis == _BY_STAGE else (0 if at == 0 else 2 if at == size - 1 else 1)
        for axis, size, at in zip(axes, shape, place)
    )


def _sample(table: NDArray[np.int64], seed: int) -> set[int]:
    """Return SAMPLE ranks: some drawn, each with a neighbour along every axis."""
    draw, found = random.Random(seed), set[int]()
    while len(found) < SAMPLE:
        place = [draw.randrange(size) for size in table.shape]
        found.add(int(table[tuple(place)]))
        for axis, size in enumerate(table.shape):
            beside = [*place]
            beside[axis] = (place[axis] + draw.randrange(1, size)) % size if size > 1 else place[axis]
            found.add(int(table[tuple(beside)]))
    return found
