"""`deepspeed.checkpoint.reshape_3d_utils`: (pipeline, tensor, data) degrees of a checkpoint, and smaller ones."""

from __future__ import annotations

from typing import Any

from zckpt.interchange import read_torch_file
from zengine.deepspeed.checkpoint.constants import (
    CHECKPOINT_PARALLEL_DIMS,
    CHECKPOINT_PP_DEGREE,
    CHECKPOINT_TP_DEGREE,
    LAYER_FILE_PREFIX,
    MODEL_FILE_PREFIX,
)
from zengine.deepspeed.checkpoint.reshape_meg_2d import meg_2d_parallel_map, reshape_meg_2d_parallel
from zengine.deepspeed.checkpoint.reshape_utils import (
    get_files,
    get_files_with_prefix,
    get_zero_files,
    partition_data,
)

__all__ = ["flatten_dp_dimension", "get_model_3d_descriptor", "model_3d_desc", "unflatten_dp_dimension"]

PP_DIM, TP_DIM, DP_DIM = "PP", "TP", "DP"


class model_3d_desc:  # noqa: N801 - DeepSpeed's name
    """Three degrees."""

    def __init__(self, pp_degree: int = 1, tp_degree: int = 1, dp_degree: int = 1) -> None:
        self.pp_degree = pp_degree
        self.tp_degree = tp_degree
        self.dp_degree = dp_degree

    def reshape(self, target_3d_desc: model_3d_desc, verbose: bool = False) -> list[meg_2d_parallel_map]:
        """Return, for each data-parallel rank of the target, the old ranks that each of its places joins.

        Raises AssertionError for larger degrees.
        """
        is_valid, problems = self.can_reshape(target_3d_desc)
        assert is_valid, ",".join(problems)
        joined = reshape_meg_2d_parallel(
            self.pp_degree, self.tp_degree, target_3d_desc.pp_degree, target_3d_desc.tp_degree, verbose
        )
        flat = flatten_dp_dimension(joined, self.pp_degree * self.tp_degree, self.dp_degree)
        return unflatten_dp_dimension(flat, target_3d_desc.dp_degree)

    def get_desc(self) -> str:
        """Return the degrees as text."""
        return f"{PP_DIM},{TP_DIM},{DP_DIM} = ({self.pp_degree}, {self.tp_degree}, {self.dp_degree})"

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.pp_degree * self.tp_degree * self.dp_degree

    def is_valid(self, pp_index: int, tp_index: int, dp_index: int) -> tuple[bool, list[str]]:
        """Return (True if the indices are within the degrees, one message for each that is not)."""
        given = {PP_DIM: (pp_index, self.pp_degree), TP_DIM: (tp_index, self.tp_degree)}
        given[DP_DIM] = (dp_index, self.dp_degree)
        problems = [
            f"{dim} indexing error: index {index} >= degree {degree}"
            for dim, (index, degree) in given.items()
            if index >= degree
        ]
        return not problems, problems

    def can_reshape(self, target_3d_desc: model_3d_desc) -> tuple[bool, list[str]]:
        """Return (True if no degree grows, one message for each that does)."""
        given = {
            PP_DIM: (self.pp_degree, target_3d_desc.pp_degree),
            TP_DIM: (self.tp_degree, target_3d_desc.tp_degree),
            DP_DIM: (self.dp_degree, target_3d_desc.dp_degree),
        }
        problems = [
            f"Expansion reshape not supported - {dim}: {old} ---> {new}"
            for dim, (old, new) in given.items()
            if new > old
        ]
        return not problems, problems


def get_model_3d_descriptor(dir: str) -> model_3d_desc:
    """Return the degrees of a checkpoint of DeepSpeed: as saved, or by the numbers of its files.

    Raises zckpt.CheckpointCorrupt for damaged model states, RuntimeError for files that contradict the saved degrees.
    """
    files = get_files(dir)
    models, shards = get_files_with_prefix(files, MODEL_FILE_PREFIX), get_zero_files(dir)
    saved: Any = read_torch_file(models[0]).get(CHECKPOINT_PARALLEL_DIMS) if models else None
    if isinstance(saved, dict):
        pp_degree, tp_degree = saved[CHECKPOINT_PP_DEGREE], saved[CHECKPOINT_TP_DEGREE]
        if pp_degree * tp_degree != len(models):
            raise RuntimeError(f"{dir} has {len(models)} model states, and was saved with {saved}: files are missing")
    else:
        tp_degree = len(get_files_with_prefix(files, f"{LAYER_FILE_PREFIX}01")) or max(1, len(models))
        pp_degree = max(1, len(models) // tp_degree)
    return model_3d_desc(pp_degree, tp_degree, max(1, len(shards) // (pp_degree * tp_degree)))


def flatten_dp_dimension(meg_2d_map: meg_2d_parallel_map, src_2d_size: int, dp_degree: int) -> meg_2d_parallel_map:
    """Add to each rank of the table the same rank of the other data-parallel replicas."""
    flat = meg_2d_parallel_map(meg_2d_map.pp_degree, meg_2d_map.tp_degree)
    for stage in range(meg_2d_map.pp_degree):
        for rank in range(meg_2d_map.tp_degree):
            for index in meg_2d_map.get_data(stage, rank):
                flat.add_data(stage, rank, [index + replica * src_2d_size for replica in range(dp_degree)])
    return flat


def unflatten_dp_dimension(meg_2d_map: meg_2d_parallel_map, dp_degree: int) -> list[meg_2d_parallel_map]:
    """Split each list of the table evenly into tables of `dp_degree` replicas."""
    tables = [meg_2d_parallel_map(meg_2d_map.pp_degree, meg_2d_map.tp_degree) for _ in range(dp_degree)]
    for stage in range(meg_2d_map.pp_degree):
        for rank in range(meg_2d_map.tp_degree):
            for table, part in zip(tables, partition_data(meg_2d_map.get_data(stage, rank), dp_degree)):
                table.add_data(stage, rank, part)
    return tables
