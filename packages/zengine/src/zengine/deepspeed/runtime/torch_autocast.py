"""`deepspeed.runtime.torch_autocast`: which parameters' gradients are reduced in autocast's dtype, and its context.

`initialize` marks these parameters with the attribute `comm_dtype` for code that asks; the engine follows its plan.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from zengine.build.trainable import check_class_names
from zengine.deepspeed.accelerator import get_accelerator

if TYPE_CHECKING:
    from zengine.deepspeed_engine import DeepSpeedEngine

__all__ = [
    "LOWER_PRECISION_SAFE_MODULES",
    "PARAM_COMM_DTYPE_ATTR_NAME",
    "autocast_if_enabled",
    "get_all_comm_dtypes",
    "get_autocast_dtype",
    "get_comm_dtype",
    "get_default_autocast_lower_precision_modules",
    "has_comm_dtype",
    "init_autocast_params",
    "is_autocast_initialized",
    "sort_dtypes",
]

LOWER_PRECISION_SAFE_MODULES = [nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d]
PARAM_COMM_DTYPE_ATTR_NAME = "comm_dtype"

_dtype: torch.dtype | None = None  # of the last engine with autocast


def init_autocast_params(
    engine: DeepSpeedEngine, dtype: torch.dtype, torch_autocast_lower_precision_safe_modules: Iterable[str] | None
) -> None:
    """Mark the parameters of an engine's modules of these classes: "torch.nn.Linear", or "Linear"; None: the default.

    Raises ValueError for a name that is no class of the model and cannot be imported.
    """
    global _dtype
    names = torch_autocast_lower_precision_safe_modules
    wanted = tuple(get_default_autocast_lower_precision_modules() if names is None else names)
    check_class_names(wanted, engine.module)
    for module in engine.module.modules():
        if any(_is_class(type(module), name) for name in wanted):
            for param in module.parameters(recurse=False):
                setattr(param, PARAM_COMM_DTYPE_ATTR_NAME, dtype)
    _dtype = dtype


def _is_class(kind: type, name: str) -> bool:
    path, _, last = name.rpartition(".")
    return last == kind.__name__ and (not path or f"{kind.__module__}.".startswith(f"{path}."))


def is_autocast_initialized() -> bool:
    """Return True after an engine with `torch_autocast` was made."""
    return _dtype is not None


def get_autocast_dtype() -> torch.dtype | None:
    """Return the autocast's dtype of the last such engine; None before the first."""
    return _dtype


def get_default_autocast_lower_precision_modules() -> list[str]:
    """Return the paths of the default classes."""
    return [f"{each.__module__}.{each.__name__}" for each in LOWER_PRECISION_SAFE_MODULES]


def has_comm_dtype(param: Tensor) -> bool:
    """Return True if a parameter is marked."""
    return hasattr(param, PARAM_COMM_DTYPE_ATTR_NAME)


def get_comm_dtype(param: Tensor) -> torch.dtype:
    """Return the dtype in which a parameter's gradient is reduced: its mark, or its own dtype."""
    found: torch.dtype = getattr(param, PARAM_COMM_DTYPE_ATTR_NAME, param.dtype)
    return found


def get_all_comm_dtypes(params: Iterable[Tensor]) -> set[torch.dtype]:
    """Return these dtypes of several parameters."""
    return {get_comm_dtype(param) for param in params}


def sort_dtypes(dtypes: Iterable[torch.dtype]) -> list[torch.dtype]:
    """Return dtypes in the order of their names."""
    return sorted(dtypes, key=str)


@contextlib.contextmanager
def autocast_if_enabled(engine: DeepSpeedEngine) -> Iterator[None]:
    """Run a block under the engine's autocast; without one, the caller's autocast is off inside."""
    device, is_on = get_accelerator().device_name(), engine.torch_autocast_enabled()
    if not is_on and not torch.is_autocast_enabled(device):
        yield
        return
    with torch.autocast(device, dtype=engine.torch_autocast_dtype() if is_on else None, enabled=is_on):
        yield
