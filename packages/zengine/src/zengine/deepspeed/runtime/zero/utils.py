"""`deepspeed.runtime.zero.utils`: comparisons over ranks, and helpers for tensors in nested values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import zcomm
import zoptim
from zengine.config import ConfigError as ZeRORuntimeException
from zengine.deepspeed.comm import broadcast_object_list, get_rank
from zengine.deepspeed.marks import is_marked
from zengine.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from zengine.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from zengine.deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from zengine.deepspeed.utils.logging import logger

__all__ = [
    "ZERO_SUPPORTED_OPTIMIZERS",
    "ZeRORuntimeException",
    "apply_to_tensors_only",
    "assert_ints_same_as_other_ranks",
    "assert_lst_len_same_as_other_ranks",
    "defragment",
    "get_lst_from_rank0",
    "get_mapping_to_flat_buffer",
    "get_norm_dtype",
    "is_builtin_type",
    "is_zero_param",
    "is_zero_supported_optimizer",
    "isinstance_namedtuple",
]

# DeepSpeed's list, and zoptim's classes.  Other optimizers work as well; DeepSpeed calls these tested.
ZERO_SUPPORTED_OPTIMIZERS: list[type] = [
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    FusedAdam,
    DeepSpeedCPUAdam,
    DeepSpeedCPUAdagrad,
    DeepSpeedCPULion,
    FusedLion,
    zoptim.Adam,
    zoptim.AdamW,
    zoptim.Adagrad,
    zoptim.Lion,
]


def is_zero_supported_optimizer(optimizer: object) -> bool:
    """Return True if the optimizer's class is in ZERO_SUPPORTED_OPTIMIZERS."""
    return type(optimizer) in ZERO_SUPPORTED_OPTIMIZERS


def get_norm_dtype() -> torch.dtype:
    """Return the dtype in which norms are accumulated."""
    return torch.float64


def assert_lst_len_same_as_other_ranks(lst: Sequence[int]) -> None:
    """Compare the length of a list over ranks; all ranks call.  Raises RuntimeError on every rank if any differs."""
    _assert_same("list length", len(lst))


def get_lst_from_rank0(lst: Sequence[int]) -> list[int]:
    """Return rank 0's list; all ranks call."""
    found = [list(lst)]
    broadcast_object_list(found, src=0)
    return found[0]


def assert_ints_same_as_other_ranks(ints: Sequence[int]) -> None:
    """Compare a list of integers over ranks; all ranks call.  Raises RuntimeError on every rank if any differs."""
    _assert_same("list", list(ints))


def _assert_same(what: str, mine: Any) -> None:
    found = zcomm.all_gather_object(mine)
    for rank, other in enumerate(found):
        if other != found[0]:
            raise RuntimeError(f"ranks disagree on a {what}: rank 0 has {found[0]}, rank {rank} has {other}")


def is_builtin_type(obj: object) -> bool:
    """Return True if the class of `obj` is one of Python's built-in classes."""
    return type(obj).__module__ == "builtins"


def isinstance_namedtuple(obj: object) -> bool:
    """Return True for an instance of a namedtuple."""
    return isinstance(obj, tuple) and hasattr(obj, "_asdict") and hasattr(obj, "_fields")


def is_zero_param(parameter: object) -> bool:
    """Return True if stage 3, or `zero.Init`, has marked the parameter (`ds_id`)."""
    return is_marked(parameter)


def apply_to_tensors_only(
    function: Callable[[Tensor], Any], value: Any, warning_msg_fn: Callable[[Any], str] | None = None
) -> Any:
    """Return `value` with `function` applied to its tensors, inside lists, tuples and dicts; dicts change in place.

    warning_msg_fn: makes the text of a warning for a value of a class that is not searched; logged once, on rank 0.
    """
    if isinstance(value, (tuple, list)):
        found = [apply_to_tensors_only(function, each) for each in value]
        return type(value)(*found) if isinstance_namedtuple(value) else type(value)(found)
    if isinstance(value, dict):
        value.update({key: apply_to_tensors_only(function, each) for key, each in value.items()})
        return value
    if isinstance(value, Tensor):
        result: Any = function(value)
        if is_zero_param(value) and not is_zero_param(result):
            result.ds_param_alias = value
        return result
    if warning_msg_fn is not None and not is_builtin_type(value) and get_rank() <= 0 and not _warned:
        _warned.append(type(value))
        logger.warning(warning_msg_fn(value))
    return value


_warned: list[type] = []  # the class that the warning was about


def get_mapping_to_flat_buffer(tensors: Sequence[Tensor]) -> list[tuple[Tensor, int, int]]:
    """Return (tensor, offset, elements) of each tensor in a buffer that holds them one after the other."""
    places, offset = [], 0
    for tensor in tensors:
        places.append((tensor, offset, tensor.numel()))
        offset += tensor.numel()
    return places


def defragment(tensors: Sequence[Tensor]) -> Tensor:
    """Move flat tensors into one buffer, of which they become views; return it.

    The copies wait on the host while the tensors' own memory is freed.  Raises ValueError for tensors of several
    dtypes or devices.
    """
    kinds = {(tensor.dtype, tensor.device) for tensor in tensors}
    if len(kinds) != 1:
        raise ValueError(f"defragment() takes tensors of one dtype and device, got {sorted(map(str, kinds))}")
    (_, device) = kinds.pop()
    places = get_mapping_to_flat_buffer(tensors)
    held = torch.cat([tensor.detach().cpu().reshape(-1) for tensor in tensors])
    for tensor in tensors:
        tensor.data = tensor.data.new_empty(0)
    buffer = held.to(device)
    for tensor, offset, numel in places:
        tensor.data = buffer[offset : offset + numel]
    return buffer
