"""Optimizers with fused unscaling, clipping and skipping, and learning-rate schedules.

The optimizers (Adam, AdamW, SGD, Adagrad, LAMB, Lion, Muon, Adafactor) replace torch.optim's: same arguments, same
state, same curve.  OneBitAdam, ZeroOneAdam and OneBitLamb average momenta over ranks in one bit an element.  SIMD
kernels on CPUs and CuPy kernels on GPUs update lists of tensors in one call; `kernels()` shows which are in use.
`state_dtype` and `split_master` reduce the bytes of the state.  Two attributes replace separate passes over the
gradients: `grad_scale` (the update divides by it) and `found_inf` (non-zero: the step changes nothing).  `grad_stats`
measures the norm for both; `accept_grad_scale` adds both to any other torch optimizer.

The schedules are DeepSpeed's five, as pure functions of the number of applied updates.

`make_optimizer` and `make_schedule` build from the names and options of a DeepSpeed config; `certainly_accepts`
checks these without torch.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from zoptim.errors import BaseShapesMissingError, UnknownNameError, UnsupportedTensorError
from zoptim.optimizers import table
from zoptim.options import OPTIMIZER_OPTIONS, SCHEDULE_OPTIONS, certainly_accepts

if TYPE_CHECKING:
    from zoptim.backends.gpu import SquaresJob
    from zoptim.backends.native import use_level
    from zoptim.backends.select import Kernels, has_kernels, kernels
    from zoptim.backends.stats import GradStats, grad_stats, sum_of_squares
    from zoptim.backends.watch import watch_tensors
    from zoptim.optimizers.build import make_optimizer
    from zoptim.optimizers.flat import FlatOptimizer
    from zoptim.optimizers.grad_scale import AcceptsGradScale, GradScaled, accept_grad_scale, supports_grad_scale
    from zoptim.optimizers.table import *  # noqa: F403
    from zoptim.schedules import (
        LRRangeTest,
        LRSchedule,
        OneCycle,
        Schedule,
        WarmupCosineLR,
        WarmupDecayLR,
        WarmupLR,
        make_schedule,
    )
    from zoptim.shards.exchange import Exchange, WholeTensors
    from zoptim.shards.segments import Segment
    from zoptim.states.formats import StateFormat

__version__ = "0.3.0"

__all__ = [
    "OPTIMIZER_OPTIONS",
    "SCHEDULE_OPTIONS",
    "certainly_accepts",
    "AcceptsGradScale",
    "BaseShapesMissingError",
    "Exchange",
    "FlatOptimizer",
    "GradScaled",
    "GradStats",
    "Kernels",
    "LRRangeTest",
    "LRSchedule",
    "OneCycle",
    "Schedule",
    "Segment",
    "SquaresJob",
    "StateFormat",
    "UnknownNameError",
    "UnsupportedTensorError",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "WholeTensors",
    "accept_grad_scale",
    "grad_stats",
    "has_kernels",
    "kernels",
    "make_optimizer",
    "make_schedule",
    "sum_of_squares",
    "supports_grad_scale",
    "use_level",
    "watch_tensors",
    *table.MODULE_BY_NAME,
]

# Imported on first use: most programs use one optimizer and one schedule, and a config is checked without torch.
_NAMES_IN = {
    "backends.gpu": "SquaresJob",
    "backends.native": "use_level",
    "backends.select": "Kernels has_kernels kernels",
    "backends.stats": "GradStats grad_stats sum_of_squares",
    "backends.watch": "watch_tensors",
    "optimizers.build": "make_optimizer",
    "optimizers.flat": "FlatOptimizer",
    "optimizers.grad_scale": "AcceptsGradScale GradScaled accept_grad_scale supports_grad_scale",
    "schedules": "LRRangeTest LRSchedule OneCycle Schedule WarmupCosineLR WarmupDecayLR WarmupLR make_schedule",
    "shards.exchange": "Exchange WholeTensors",
    "shards.segments": "Segment",
    "states.formats": "StateFormat",
}
_LAZY_MODULES = dict(table.MODULE_BY_NAME)
_LAZY_MODULES |= {name: f"zoptim.{module}" for module, names in _NAMES_IN.items() for name in names.split()}

# Old public name -> new one; for one minor version.
RENAMED = {"speaks_grad_scale": "supports_grad_scale"}


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name in RENAMED:
        is_import = sys._getframe(1).f_code.co_name == "_handle_fromlist"  # of `from ... import name`
        error = ImportError if is_import else AttributeError
        raise error(f"{__name__}.{name} was renamed in 0.3.0; use {__name__}.{RENAMED[name]}.")
    if name not in _LAZY_MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(_LAZY_MODULES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY_MODULES})
