"""`deepspeed.utils.debug`: names of modules and parameters for messages, and prints of many ranks.

Names are those of the model that `debug_extract_module_and_param_names` was called with last.
"""

from __future__ import annotations

import fcntl
import weakref
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from zengine.deepspeed.comm.world import get_rank

__all__ = [
    "debug_clear_module_and_param_names",
    "debug_extract_module_and_param_names",
    "debug_module2name",
    "debug_module2name_class",
    "debug_module2name_id",
    "debug_param2name",
    "debug_param2name_id",
    "debug_param2name_id_numel",
    "debug_param2name_id_shape",
    "debug_param2name_id_shape_device",
    "debug_param2name_id_shape_status",
    "log_rank_file",
    "print_rank",
    "print_rank0",
    "printflock",
]

_names: dict[int, tuple[weakref.ref[Any], str]] = {}  # by id, with the object, since ids are used again


def debug_clear_module_and_param_names() -> None:
    """Forget all names."""
    _names.clear()


def debug_extract_module_and_param_names(model: nn.Module) -> None:
    """Remember the names of a model's modules and parameters, and no others."""
    debug_clear_module_and_param_names()
    for name, each in (*model.named_modules(), *model.named_parameters()):
        _names[id(each)] = (weakref.ref(each), name)


def _name(each: Any) -> str:
    found = _names.get(id(each))
    return found[1] if found is not None and found[0]() is each else "unknown"


def debug_module2name(module: nn.Module) -> str:
    """Return the name, or "unknown"."""
    return _name(module)


def debug_module2name_id(module: nn.Module) -> str:
    return f"name={_name(module)}"


def debug_module2name_class(module: nn.Module) -> str:
    return f"name={_name(module)} {type(module).__name__}"


def debug_param2name(param: Tensor) -> str:
    """Return the name, or "unknown"."""
    return _name(param)


def debug_param2name_id(param: Tensor) -> str:
    return f"name={_name(param)} id={getattr(param, 'ds_id', 'none')}"


def debug_param2name_id_shape(param: Tensor) -> str:
    return f"{debug_param2name_id(param)} shape={getattr(param, 'ds_shape', param.shape)}"


def debug_param2name_id_shape_device(param: Tensor) -> str:
    return f"{debug_param2name_id_shape(param)} device={param.device}"


def debug_param2name_id_numel(param: Tensor) -> str:
    return f"{debug_param2name_id(param)} numel={param.numel()}"


def debug_param2name_id_shape_status(param: Any) -> str:
    """Return name, id, shape and `ds_status`, which parameters have at stage 3."""
    return f"{debug_param2name_id_shape(param)} status={param.ds_status}"


def printflock(*msgs: Any) -> None:
    """Print while the other processes of this host that call it wait, so that lines do not mix."""
    with open(__file__, encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        print(*msgs, flush=True)


def log_rank_file(rank: int, *msgs: Any) -> None:
    """Append each message as a line to log_rank_<rank>.txt in the working directory."""
    with Path(f"log_rank_{rank}.txt").open("a", encoding="utf-8") as file:
        file.writelines(f"{each}\n" for each in msgs)


def print_rank(*msg: Any, force: bool = False) -> None:
    """Print with the rank, if `force`."""
    if force:
        print(f"[{get_rank()}]", *msg)


def print_rank0(*msg: Any, force: bool = False) -> None:
    """Print with the rank on rank 0, if `force`."""
    if get_rank() == 0:
        print_rank(*msg, force=force)
