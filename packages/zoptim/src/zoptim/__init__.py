"""Optimizers that unscale, clip and skip while they update, and learning-rate schedules.

The optimizers (Adam, AdamW, SGD, Adagrad, LAMB, Lion, Muon, Adafactor) replace torch.optim's: same arguments, same
state, same curve.  SIMD kernels on CPUs and CuPy kernels on GPUs update whole lists of tensors in one call;
`kernels()` tells which are in use.  `state_dtype` and `split_master` trade bytes for speed, and two attributes
replace passes of their own: `grad_scale` (gradients are divided by it) and `found_inf` (non-zero: the step changes
nothing). `grad_stats` reads the norm that both come from; `accept_grad_scale` gives any other torch optimizer the
same two.

The schedules are DeepSpeed's five, as pure laws of the number of applied updates.

`make_optimizer` and `make_schedule` build both from the names and options of a DeepSpeed config.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .adam import Adam, AdamW
from .backends import has_kernels
from .build import make_optimizer
from .errors import NotAvailableYetError, UnknownNameError, UnsupportedTensorError
from .flat import FlatOptimizer
from .formats import StateFormat
from .grad_scale import AcceptsGradScale, GradScaled, accept_grad_scale, speaks_grad_scale
from .native import Kernels, kernels
from .segments import Segment
from .sgd import SGD
from .stats import GradStats, grad_stats, sum_of_squares

if TYPE_CHECKING:
    from .adafactor import Adafactor
    from .adagrad import Adagrad
    from .lamb import LAMB
    from .lion import Lion
    from .muon import Muon
    from .rules import AdamMoments, adagrad_rule, adam_rule, adamw_rule, lamb_rule, lion_rule, sgd_rule
    from .rules_adafactor import AdafactorMoments, adafactor_rule
    from .rules_muon import muon_rule, orthogonalize
    from .schedules import (
        LRRangeTest,
        LRSchedule,
        OneCycle,
        Schedule,
        WarmupCosineLR,
        WarmupDecayLR,
        WarmupLR,
        make_schedule,
    )

__version__ = "0.2.0"

__all__ = [
    "LAMB",
    "SGD",
    "AcceptsGradScale",
    "Adafactor",
    "AdafactorMoments",
    "Adagrad",
    "Adam",
    "AdamMoments",
    "AdamW",
    "FlatOptimizer",
    "GradScaled",
    "GradStats",
    "Kernels",
    "LRRangeTest",
    "LRSchedule",
    "Lion",
    "Muon",
    "NotAvailableYetError",
    "OneCycle",
    "Schedule",
    "Segment",
    "StateFormat",
    "UnknownNameError",
    "UnsupportedTensorError",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "accept_grad_scale",
    "adafactor_rule",
    "adagrad_rule",
    "adam_rule",
    "adamw_rule",
    "grad_stats",
    "has_kernels",
    "kernels",
    "lamb_rule",
    "lion_rule",
    "make_optimizer",
    "make_schedule",
    "muon_rule",
    "orthogonalize",
    "sgd_rule",
    "speaks_grad_scale",
    "sum_of_squares",
]

# Imported on first use: optimizers that most programs never name.
_HOMES = {
    "adafactor": "Adafactor",
    "adagrad": "Adagrad",
    "lamb": "LAMB",
    "lion": "Lion",
    "muon": "Muon",
    "rules": "AdamMoments adagrad_rule adam_rule adamw_rule lamb_rule lion_rule sgd_rule",
    "rules_adafactor": "AdafactorMoments adafactor_rule",
    "rules_muon": "muon_rule orthogonalize",
    "schedules": "LRRangeTest LRSchedule OneCycle Schedule WarmupCosineLR WarmupDecayLR WarmupLR make_schedule",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f".{_HOME_OF[name]}", __name__), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
