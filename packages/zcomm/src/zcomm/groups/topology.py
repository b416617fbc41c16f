"""Process topology: ranks as points of a grid with named axes.  Arithmetic only, no processes.

    grid = ProcessTopology(["pipe", "data"], [2, 4])
    grid.get_rank(pipe=1, data=0)                     # 4
    grid.get_axis_comm_lists("pipe")                  # [[0, 4], [1, 5], [2, 6], [3, 7]]

The last axis changes fastest.  Names and methods are those of DeepSpeed's class; `zcomm.groups.axes` makes groups.
"""

from __future__ import annotations

import itertools
import math
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

__all__ = ["PipeDataParallelTopology", "PipeModelDataParallelTopology", "ProcessTopology"]


class ProcessTopology:
    """Grid of ranks; `dims` are the sizes of `axes`, slowest first.

    Raises ValueError for lists of different lengths, repeated names, or a size below 1.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        if len(axes) != len(dims) or len(set(axes)) != len(axes) or any(size < 1 for size in dims):
            raise ValueError(
                f"a topology needs distinct axes with a size of at least 1 each; got axes {list(axes)} and sizes "
                f"{list(dims)}"
            )
        self.axes, self.dims = list(axes), list(dims)
        coord: Any = namedtuple("ProcessCoord", self.axes)  # type: ignore[misc]  # its fields are an argument
        points = itertools.product(*map(range, dims))
        self.ProcessCoord = coord
        self.mapping: dict[Any, int] = {coord(*point): rank for rank, point in enumerate(points)}

    def get_rank(self, **coord_kwargs: int) -> int:
        """Rank at a point; every axis is named.  Raises ValueError."""
        if sorted(coord_kwargs) != sorted(self.axes):
            raise ValueError(
                f"get_rank() takes one number for each of {', '.join(self.axes)}, got "
                f"{', '.join(coord_kwargs) or 'none'}; filter_match() accepts some of them"
            )
        point = self.ProcessCoord(**coord_kwargs)
        if point not in self.mapping:
            raise ValueError(f"{point} is outside of the grid {self}")
        return self.mapping[point]

    def get_axis_names(self) -> list[str]:
        """Names of the axes, slowest first."""
        return self.axes

    def get_dim(self, axis: str) -> int:
        """Size of `axis`; 0 for an unknown one."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """Point of a rank, with a field for each axis.  Raises ValueError."""
        for point, number in self.mapping.items():
            if number == rank:
                return point
        raise ValueError(f"rank {rank} is outside of the grid {self}")

    def get_rank_repr(
        self,
        rank: int,
        omit_axes: Sequence[str] = ("data", "pipe"),
        inner_sep: str = "_",
        outer_sep: str = "-",
    ) -> str:
        """Point as text, such as "model_00", without `omit_axes`: for file names."""
        point = self.get_coord(rank)
        shown = [axis for axis in self.axes if axis not in omit_axes]
        return outer_sep.join(f"{axis}{inner_sep}{getattr(point, axis):02d}" for axis in shown)

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Lists of the ranks that differ along `axis` only; empty for an unknown axis."""
        if axis not in self.axes:
            return []
        others = [each for each in self.axes if each != axis]
        found: dict[tuple[int, ...], list[int]] = {}
        for point, rank in self.mapping.items():
            found.setdefault(tuple(getattr(point, each) for each in others), []).append(rank)
        return list(found.values())

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """All ranks at points with these coordinates, in order."""
        return [
            rank
            for point, rank in self.mapping.items()
            if all(getattr(point, axis) == number for axis, number in filter_kwargs.items())
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """All ranks whose coordinate along `axis` is `idx`."""
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.dims)

    def __str__(self) -> str:
        return " x ".join(f"{axis}={size}" for axis, size in zip(self.axes, self.dims))


class PipeDataParallelTopology(ProcessTopology):
    """Pipeline stages of data-parallel ranks; neighbours share a stage."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Pipeline, data and model parallelism; model-parallel ranks are neighbours."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])
