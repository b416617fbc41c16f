"""`deepspeed.comm.utils`: ranks by the launcher's environment, and sizes of messages."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

from zengine.deepspeed.utils.comms_logging import get_caller_func

__all__ = [
    "get_debug_log_name",
    "get_default_args",
    "get_local_rank_from_launcher",
    "get_msg_size_from_args",
    "get_tensor_kwarg",
    "get_tensor_position",
    "get_world_rank_from_launcher",
    "get_world_size_from_launcher",
]

_TENSORS = ("tensor", "tensors", "input_list", "input_tensor_list", "p2p_op_list")  # arguments that are sent


def get_local_rank_from_launcher() -> int:
    """Return LOCAL_RANK, or Open MPI's; 0 without both."""
    return _read("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", 0)


def get_world_rank_from_launcher() -> int:
    """Return RANK, or Open MPI's; 0 without both."""
    return _read("RANK", "OMPI_COMM_WORLD_RANK", 0)


def get_world_size_from_launcher() -> int:
    """Return WORLD_SIZE, or Open MPI's; 1 without both."""
    return _read("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", 1)


def _read(name: str, of_mpi: str, alone: int) -> int:
    return int(os.environ.get(name, os.environ.get(of_mpi, alone)))


def get_default_args(func: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments that have a default, with it."""
    parameters = inspect.signature(func).parameters.values()
    return {each.name: each.default for each in parameters if each.default is not inspect.Parameter.empty}


def get_tensor_position(func: Callable[..., Any]) -> int:
    """Return the position of the argument that is sent; -1 if there is none."""
    names = list(inspect.signature(func).parameters)
    return next((names.index(name) for name in _TENSORS if name in names), -1)


def get_tensor_kwarg(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what `kwargs`, or a default, has for the argument that is sent; None without it."""
    given = {**get_default_args(func), **kwargs}
    return next((given[name] for name in _TENSORS if name in given), None)


def get_msg_size_from_args(func: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """Return the bytes that this call of `func` sends; of lists, the sum.  0 without tensors."""
    position = get_tensor_position(func)
    sent = args[position] if 0 <= position < len(args) else get_tensor_kwarg(func, kwargs)
    if sent is None:
        return 0
    tensors: list[Any] = list(sent) if isinstance(sent, (list, tuple)) else [sent]
    return sum(int(getattr(each, "tensor", each).nbytes) for each in tensors)


def get_debug_log_name(func_args: Mapping[str, Any], debug: bool) -> str:
    """Return the `log_name`, with the calling function if `debug`."""
    name = str(func_args["log_name"])
    return f"{name} | [Caller Func: {get_caller_func()}]" if debug else name
