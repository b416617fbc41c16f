"""`deepspeed.runtime.utils`: small helpers, memory reports, and names of gradients.py and partitioning.py."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar, final

import numpy
import torch
from torch import Tensor, nn

from zengine.data import RepeatingLoader
from zengine.deepspeed.accelerator import get_accelerator
from zengine.deepspeed.comm import get_rank, is_initialized, reduce
from zengine.deepspeed.runtime.gradients import (
    CheckOverflow,
    clip_grad_norm_,
    clip_tensors_by_global_norm,
    combine_grad_norm_groups,
    get_flattened_grad_norm,
    get_global_norm,
    get_global_norm_of_tensors,
    get_grad_norm,
    get_grad_zeros,
    get_norm_with_moe_layers,
    get_weight_norm,
    has_inf_or_nan,
    is_invalid_grad_norm,
    is_model_parallel_parameter,
    mask_nan_or_inf_with_val_inplace,
)
from zengine.deepspeed.runtime.partitioning import (
    PartitionedTensor,
    align_dense_tensors,
    all_gather_dp_groups,
    all_gather_into_tensor_dp_groups,
    partition_balanced,
    partition_uniform,
    prefix_sum_inc,
)
from zengine.deepspeed.utils.bwc import (
    bwc_pipeline_parallel_group,
    bwc_pipeline_parallel_world_size,
    bwc_tensor_model_parallel_rank,
)

__all__ = [
    "CheckOverflow",
    "DummyOptim",
    "PartitionedTensor",
    "RepeatingLoader",
    "align_dense_tensors",
    "all_gather_dp_groups",
    "all_gather_into_tensor_dp_groups",
    "bwc_pipeline_parallel_group",
    "bwc_pipeline_parallel_world_size",
    "bwc_tensor_model_parallel_rank",
    "call_to_str",
    "clip_grad_norm_",
    "clip_tensors_by_global_norm",
    "combine_grad_norm_groups",
    "compare_tensors_in_structures",
    "copy_to_device",
    "empty_cache",
    "ensure_directory_exists",
    "filter_empty_parameters",
    "get_checkpoint_folder_size",
    "get_flattened_grad_norm",
    "get_global_norm",
    "get_global_norm_of_tensors",
    "get_grad_norm",
    "get_grad_zeros",
    "get_inactive_params",
    "get_ma_status",
    "get_norm_with_moe_layers",
    "get_only_unique_item",
    "get_tensor_bytes",
    "get_weight_norm",
    "has_inf_or_nan",
    "is_invalid_grad_norm",
    "is_model_parallel_parameter",
    "mask_nan_or_inf_with_val_inplace",
    "memory_status",
    "move_to_device",
    "noop_context",
    "noop_decorator",
    "partition_balanced",
    "partition_uniform",
    "prefix_sum_inc",
    "see_memory_usage",
    "set_random_seed",
]

T = TypeVar("T")
Criterion = Callable[[Any], bool]

_GIB = 1024**3


@final
class DummyOptim:
    """Parameters as one group of an optimizer that has no step."""

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": params}]


def noop_decorator(func: T) -> T:
    """Return `func`."""
    return func


@final
class noop_context:  # noqa: N801  # DeepSpeed's name
    """A block without effect."""

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        """Do nothing."""


def ensure_directory_exists(filename: str | os.PathLike[str]) -> None:
    """Create the folder of a file."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


def set_random_seed(seed: int) -> None:
    """Seed Python, numpy and torch; larger seeds are reduced to the 32 and 63 bits that the latter two take."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


def _mapped(item: Any, visit: Callable[[Any], Any]) -> Any:
    """Return a copy of nested lists, tuples and dicts with `visit` applied to all else."""
    if isinstance(item, dict):
        return {name: _mapped(each, visit) for name, each in item.items()}
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(_mapped(each, visit) for each in item))
    if isinstance(item, (list, tuple)):
        return type(item)(_mapped(each, visit) for each in item)
    return visit(item)


def copy_to_device(item: Any, device: torch.device | str, criterion_func: Criterion) -> Any:
    """Return `item` with copies on `device` of the tensors that `criterion_func` selects."""
    return _mapped(item, lambda each: each.to(device) if criterion_func(each) else each)


def move_to_device(item: Any, device: torch.device | str, criterion_func: Criterion | None = None) -> Any:
    """Return `item` with the tensors in its dicts, lists and tuples on `device`.

    Tensors that `criterion_func` selects are moved in place: whoever holds them sees the move.  All others are moved
    by `to()`.
    """

    def visit(each: Any) -> Any:
        if not isinstance(each, Tensor):
            return each
        if criterion_func is None or not criterion_func(each):
            return each.to(device)
        each.data = each.data.to(device)
        return each

    return _mapped(item, visit)


def filter_empty_parameters(params: Any) -> Any:
    """Return a list of parameters or of groups without parameters that have no elements, and without empty groups."""
    if not isinstance(params, (list, tuple)) or not params:
        return params
    if not isinstance(params[0], dict):
        return [param for param in params if param.numel() > 0]
    kept = [{**group, "params": [param for param in group["params"] if param.numel() > 0]} for group in params]
    return [group for group in kept if group["params"]]


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """Return the text of a call: "base(1, name='x')"."""
    named = (f"{key}={value!r}" for key, value in kwargs.items())
    return f"{base}({', '.join([*map(repr, args), *named])})"


def get_only_unique_item(items: Iterable[T]) -> T:
    """Return the value that all items have.  Raises RuntimeError if they differ, or there are none."""
    found = set(items)
    if len(found) != 1:
        raise RuntimeError(f"expected there to be only one unique element in {items}")
    return found.pop()


def get_tensor_bytes(item: Any) -> int:
    """Return the bytes of the tensors in nested lists, tuples and dicts."""
    sizes: list[int] = []
    _mapped(item, lambda each: sizes.append(each.nbytes if isinstance(each, Tensor) else 0))
    return sum(sizes)


def get_checkpoint_folder_size(save_dir: str, tag: str, local_rank: int | None = None) -> int:
    """Return the bytes of a checkpoint: summed on rank 0 over the hosts, whose first ranks read their folder."""
    files = [path for path in Path(save_dir, tag).rglob("*") if path.is_file()] if local_rank == 0 else []
    total = torch.tensor(sum(path.stat().st_size for path in files), device=get_accelerator().device_name())
    reduce(total, 0)
    return int(total)


def get_inactive_params(param_list: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters that stage 3 has released on this rank."""
    from zengine.deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    return [
        param
        for param in param_list
        if hasattr(param, "ds_id") and getattr(param, "ds_status", None) == ZeroParamStatus.NOT_AVAILABLE
    ]


def compare_tensors_in_structures(inputs1: Any, inputs2: Any) -> bool:
    """Return True if two lists or two dicts have equal members; key-value caches count as equal."""
    if type(inputs1) is not type(inputs2) or not isinstance(inputs1, (list, dict)):
        return False
    if len(inputs1) != len(inputs2) or (isinstance(inputs1, dict) and inputs1.keys() != inputs2.keys()):
        return False
    names = inputs1 if isinstance(inputs1, dict) else range(len(inputs1))
    return all(_is_equal(inputs1[name], inputs2[name]) for name in names)


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other.to(one.device))
    if hasattr(one, "get_seq_length"):  # a cache of Transformers
        return type(one) is type(other)
    return bool(one == other)


def get_ma_status() -> int:
    """Return the allocated bytes of the device; 0 on other ranks than the first."""
    return 0 if is_initialized() and get_rank() else get_accelerator().memory_allocated()


_before: list[int] = [0]  # allocated bytes at the last memory_status


def memory_status(msg: str, print_rank: int = -1, reset_max: bool = False) -> None:
    """Print the allocated memory of the device and its change, on every rank or on `print_rank`."""
    device = get_accelerator()
    if print_rank not in (-1, get_rank()):
        return
    device.synchronize()
    if reset_max:
        device.reset_peak_memory_stats()
    now, peak = device.memory_allocated(), device.max_memory_allocated()
    change, _before[0] = now - _before[0], now
    print(
        f"RANK={get_rank()} MEMSTATS {msg} device={device.current_device_name()} current alloc={now / _GIB:0.4f}GB "
        f"(delta={change / _GIB:0.4f}GB max={peak / _GIB:0.4f}GB)"
    )


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print the memory of the device and of the host, on rank 0; does nothing without `force`.

    MA: allocated now; Max_MA: at most since the last call.
    """
    if not force or (is_initialized() and get_rank()):
        return
    gc.collect()
    device = get_accelerator()
    allocated, peak = (round(each() / _GIB, 2) for each in (device.memory_allocated, device.max_memory_allocated))
    print(message)
    print(f"MA {allocated} GB         Max_MA {peak} GB")
    total, free = (os.sysconf("SC_PAGE_SIZE") * os.sysconf(name) for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
    used = total - free
    print(f"CPU Virtual Memory:  used = {round(used / _GIB, 2)} GB, percent = {round(100 * used / total, 1)}%")
    device.reset_peak_memory_stats()


def empty_cache() -> None:
    """Collect Python's garbage, empty the device's cache and forget its peak."""
    gc.collect()
    get_accelerator().empty_cache()
    get_accelerator().reset_peak_memory_stats()
