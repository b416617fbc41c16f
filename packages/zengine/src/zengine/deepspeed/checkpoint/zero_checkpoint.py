"""`deepspeed.checkpoint.zero_checkpoint`: DeepSpeed's optimizer shards, joined for smaller degrees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from zckpt.interchange import read_torch_file
from zengine.deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    GROUP_PADDINGS,
    OPTIMIZER_STATE_DICT,
    PARTITION_COUNT,
)
from zengine.deepspeed.checkpoint.reshape_3d_utils import get_model_3d_descriptor, model_3d_desc
from zengine.deepspeed.checkpoint.reshape_utils import basic_folder_validation, get_zero_files, merge_state

__all__ = ["ZeROCheckpoint"]


class ZeROCheckpoint:
    """The optimizer shards in one folder (`save_dir/tag`)."""

    def __init__(self, dir: str, source_3d: model_3d_desc | None = None) -> None:
        basic_folder_validation(dir)
        self.dir = dir
        self.file_list = get_zero_files(dir)
        self.num_files = len(self.file_list)
        assert self.num_files > 0, f"No ZeRO files found in {dir}"
        self.src_3d = get_model_3d_descriptor(dir) if source_3d is None else source_3d
        self.reshape(model_3d_desc(self.src_3d.pp_degree, self.src_3d.tp_degree, self.src_3d.dp_degree))

    def reshape(self, target_3d_desc: model_3d_desc) -> None:
        """Choose the degrees that `get_state_for_rank` counts in; raises AssertionError if one grows."""
        self.target_3d = target_3d_desc
        self._tables = self.src_3d.reshape(target_3d_desc)

    def get_src_world_size(self) -> int:
        return self.src_3d.world_size()

    def get_src_tp_degree(self) -> int:
        return self.src_3d.tp_degree

    def get_src_pp_degree(self) -> int:
        return self.src_3d.pp_degree

    def get_src_dp_degree(self) -> int:
        return self.src_3d.dp_degree

    def get_file_indices_for_rank(self, pp_index: int, tp_index: int, dp_index: int) -> list[int]:
        """Return the numbers of the files that a rank of the target joins."""
        assert dp_index < len(self._tables), f"DP index {dp_index} >= DP degree {len(self._tables)}"
        return self._tables[dp_index].get_data(pp_index, tp_index)

    def get_files_for_rank(self, pp_index: int, tp_index: int, dp_index: int) -> list[str]:
        """Return their paths."""
        return [self.file_list[index] for index in self.get_file_indices_for_rank(pp_index, tp_index, dp_index)]

    def get_state_for_rank(
        self,
        pp_index: int,
        tp_index: int,
        dp_index: int,
        keys_to_ignore: Sequence[str] = (),
        strip_tensor_paddings: bool = True,
    ) -> Any:
        """Return the joined content of a rank's files, without the padding of the flat moments.

        Objects of DeepSpeed's classes are `zckpt.interchange` records: their attributes are in `state`.
        """
        merged: Any = None
        for path in self.get_files_for_rank(pp_index, tp_index, dp_index):
            state = {key: value for key, value in read_torch_file(path).items() if key not in keys_to_ignore}
            if strip_tensor_paddings:
                _strip_paddings(state.get(OPTIMIZER_STATE_DICT) or {})
            merged = state if merged is None else merge_state(merged, state)
            inner = merged.get(OPTIMIZER_STATE_DICT) or {}
            if isinstance(inner.get(PARTITION_COUNT), list):
                inner[PARTITION_COUNT] = [self.target_3d.dp_degree] * len(inner[PARTITION_COUNT])
            if strip_tensor_paddings and inner.get(GROUP_PADDINGS):
                inner[GROUP_PADDINGS] = [0] * len(inner[GROUP_PADDINGS])
        return merged

    def print_3d_index_map(self, tag: str | None = None) -> None:
        """Print the numbers of the files by rank."""
        if tag:
            print(f"3D index map: {tag}")
        for index, table in enumerate(self._tables):
            table.print_data(f"dp = {index}")

    def print_3d_file_map(self, tag: str | None = None) -> None:
        """Print the paths of the files by rank."""
        if tag:
            print(f"3D file map: {tag}")
        for dp_index, table in enumerate(self._tables):
            for pp_index in range(table.pp_degree):
                for tp_index in range(table.tp_degree):
                    files = self.get_files_for_rank(pp_index, tp_index, dp_index)
                    print(f"{pp_index}, {tp_index}, {dp_index} => {files}")


def _strip_paddings(optimizer: dict[str, Any]) -> None:
    """Cut the padding off the moments of each group, in place."""
    states = (optimizer.get(BASE_OPTIMIZER_STATE) or {}).get("state") or {}
    for group, padding in enumerate(optimizer.get(GROUP_PADDINGS) or ()):
        for key, value in states.get(group, {}).items() if padding else ():
            if key != "step" and isinstance(value, Tensor):
                states[group][key] = value[: value.numel() - padding].clone()
