"""`deepspeed.checkpoint.reshape_meg_2d`: ranks by (pipeline, tensor) index, and such tables of smaller degrees."""

from __future__ import annotations

from typing import Any

from zengine.deepspeed.checkpoint.reshape_utils import partition_data

__all__ = ["get_mpu_ranks", "meg_2d_parallel_map", "reshape_meg_2d_parallel"]


class meg_2d_parallel_map:  # noqa: N801 - DeepSpeed's name
    """A list for each (pipeline index, tensor index)."""

    def __init__(self, pp_degree: int, tp_degree: int) -> None:
        self.pp_degree = pp_degree
        self.tp_degree = tp_degree
        self.map: dict[str, list[Any]] = {}

    def simple_init(self) -> None:
        """Number the places, tensor index fastest."""
        for index in range(self.pp_degree * self.tp_degree):
            self.map[self._key(*divmod(index, self.tp_degree))] = [index]

    def add_data(self, pp_index: int, tp_index: int, data: list[Any]) -> None:
        """Append `data` at a place."""
        self._check(pp_index, tp_index)
        assert isinstance(data, list), f"data must be a list, is a {type(data).__name__}"
        self.map.setdefault(self._key(pp_index, tp_index), []).extend(data)

    def get_data(self, pp_index: int | None = None, tp_index: int | None = None) -> list[Any]:
        """Return the list of a place; None: of all, pipeline index first."""
        self._check(pp_index, tp_index)
        stages = range(self.pp_degree) if pp_index is None else [pp_index]
        ranks = range(self.tp_degree) if tp_index is None else [tp_index]
        return [item for i in stages for j in ranks for item in self.map[self._key(i, j)]]

    def print_data(self, tag: Any) -> None:
        """Print the table under a heading."""
        print(f"{tag}")
        for key, value in self.map.items():
            print(f"{key} = {value}")

    def _check(self, pp_index: int | None, tp_index: int | None) -> None:
        assert pp_index is None or pp_index < self.pp_degree, f"pp_index {pp_index} of {self.pp_degree}"
        assert tp_index is None or tp_index < self.tp_degree, f"tp_index {tp_index} of {self.tp_degree}"

    @staticmethod
    def _key(pp_index: int, tp_index: int) -> str:
        return f"{pp_index},{tp_index}"


def reshape_meg_2d_parallel(
    old_pp_degree: int, old_tp_degree: int, new_pp_degree: int, new_tp_degree: int, verbose: bool = False
) -> meg_2d_parallel_map:
    """Return the old ranks that each place of the smaller degrees joins; tensor ranks are joined first.

    Raises AssertionError for larger degrees, or ones that do not divide.
    """
    assert new_pp_degree <= old_pp_degree, f"pipeline degree {old_pp_degree} cannot grow to {new_pp_degree}"
    assert new_tp_degree <= old_tp_degree, f"tensor degree {old_tp_degree} cannot grow to {new_tp_degree}"
    old = meg_2d_parallel_map(old_pp_degree, old_tp_degree)
    old.simple_init()
    narrow = meg_2d_parallel_map(old_pp_degree, new_tp_degree)
    for stage in range(old_pp_degree):
        for rank, part in enumerate(partition_data(old.get_data(pp_index=stage), new_tp_degree)):
            narrow.add_data(stage, rank, part)
    final = meg_2d_parallel_map(new_pp_degree, new_tp_degree)
    for rank in range(new_tp_degree):
        for stage, part in enumerate(partition_data(narrow.get_data(tp_index=rank), new_pp_degree)):
            final.add_data(stage, rank, part)
    if verbose:
        for title, table in (("original_2d_map:", old), ("after_tp_reshape:", narrow), ("final_2d_map:", final)):
            table.print_data(title)
    return final


def get_mpu_ranks(
    tp_size: int = 1, pp_size: int = 1, dp_size: int = 1, virtual_pp_size: int | None = None
) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Return the ranks of Megatron's (tensor, pipeline, data) groups: tensor fastest, then data, then pipeline."""
    block = tp_size * dp_size
    data = [
        list(range(stage * block + rank, (stage + 1) * block, tp_size))
        for stage in range(pp_size)
        for rank in range(tp_size)
    ]
    pipeline = [[group[index] for group in data] for index in range(dp_size)]
    tensor = [list(range(start, start + tp_size)) for start in range(0, block * pp_size, tp_size)]
    return tensor, pipeline, data
