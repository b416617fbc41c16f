"""`deepspeed.checkpoint.reshape_utils`: files of a checkpoint by name, and states of several ranks joined."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import torch

from zengine.deepspeed.checkpoint.constants import (
    BF16_ZERO_FILE_PREFIX,
    FP16_ZERO_FILE_PREFIX,
    MODEL_FILE_PREFIX,
    ZERO_FILE_PREFIX,
)

__all__ = [
    "basic_folder_validation",
    "get_files",
    "get_files_with_prefix",
    "get_zero_files",
    "merge_state",
    "merge_state_dict",
    "merge_state_list",
    "partition_data",
    "sort_zero_files",
    "validate_files",
]


def basic_folder_validation(dir: str) -> None:
    """Raise AssertionError unless `dir` is a folder."""
    assert os.path.exists(dir), f"{dir} does not exist: pass the folder of one checkpoint (save_dir/tag)"
    assert os.path.isdir(dir), f"{dir} is not a folder: pass the folder of one checkpoint (save_dir/tag)"


def get_files(dir: str) -> list[str]:
    """Return the paths of all files below `dir`."""
    return [os.path.join(root, name) for root, _, names in os.walk(dir) for name in names]


def get_files_with_prefix(all_files: Sequence[str], prefix: str) -> list[str]:
    """Return the paths whose file name begins with `prefix`, sorted."""
    return sorted(path for path in all_files if os.path.basename(path).startswith(prefix))


def validate_files(file_list: Sequence[str]) -> None:
    """Print an error for each path that is no file."""
    for path in file_list:
        if not os.path.isfile(path):
            print(f"Error: {path} is not existent")


def sort_zero_files(files: Sequence[str], prefix: str) -> list[str]:
    """Return optimizer shards in the order of (data-parallel rank, model-parallel rank).

    Raises ValueError for a name without both.
    """
    ranks: dict[str, tuple[int, int]] = {}
    for path in files:
        match = re.search(rf"{prefix}(\d+)_{MODEL_FILE_PREFIX}(\d+)", path)
        if match is None:
            raise ValueError(f"{path} has no {prefix}<rank>_{MODEL_FILE_PREFIX}<rank> in its name")
        ranks[path] = (int(match[1]), int(match[2]))
    return sorted(ranks, key=ranks.__getitem__)


def get_zero_files(dir: str) -> list[str]:
    """Return the optimizer shards of a checkpoint by rank; [] without ZeRO."""
    every = get_files(dir)
    for prefix in (ZERO_FILE_PREFIX, FP16_ZERO_FILE_PREFIX, BF16_ZERO_FILE_PREFIX):
        if found := get_files_with_prefix(every, prefix):
            return sort_zero_files(found, prefix)
    return []


def partition_data(data_list: Sequence[Any], num_partitions: int) -> list[Any]:
    """Return `num_partitions` equal runs of a list; raises AssertionError if it does not divide."""
    size, rest = divmod(len(data_list), num_partitions)
    assert rest == 0, f"{len(data_list)} items do not divide by {num_partitions}"
    return [data_list[start : start + size] for start in range(0, len(data_list), size)]


def merge_state(state_a: Any, state_b: Any, key_list: Sequence[str] = ()) -> Any:
    """Join the states of two ranks: tensors along dim 0, containers item by item; of other values, such as counts in
    tensors of no dims, the first.

    Raises ValueError for different types or lengths.
    """
    if type(state_a) is not type(state_b):
        where = ".".join(key_list)
        raise ValueError(f"cannot merge a {type(state_a).__name__} and a {type(state_b).__name__} at {where!r}")
    if isinstance(state_a, dict):
        return merge_state_dict(state_a, state_b, key_list)
    if isinstance(state_a, (list, tuple)):
        return type(state_a)(merge_state_list(state_a, state_b, key_list))
    return torch.cat([state_a, state_b]) if isinstance(state_a, torch.Tensor) and state_a.dim() else state_a


def merge_state_dict(dict_a: Any, dict_b: Any, key_list: Sequence[str] = ()) -> Any:
    """Join dicts key by key, in the order of the second; keys of the second alone are kept."""
    merged = type(dict_a)()
    for key, value in dict_b.items():
        merged[key] = merge_state(dict_a[key], value, [str(key)]) if key in dict_a else value
    return merged


def merge_state_list(list_a: Any, list_b: Any, key_list: Sequence[str] = ()) -> list[Any]:
    """Join lists item by item.  Raises ValueError for different lengths."""
    if len(list_a) != len(list_b):
        raise ValueError(f"cannot merge lists of {len(list_a)} and {len(list_b)} items at {'.'.join(key_list)!r}")
    return [merge_state(a, b, key_list) for a, b in zip(list_a, list_b)]
