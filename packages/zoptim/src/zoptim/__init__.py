"""Optimizers that unscale, clip and skip while they update, and learning-rate schedules.

The optimizers (AdamW, Adam, SGD) replace torch.optim's: same arguments, same state, same curve.  They are
elementwise, so they work on whole tensors and on flat shards alike, and they read two attributes that
otherwise cost passes of their own: `grad_scale` (gradients are divided by it) and `found_inf` (non-zero:
the step changes nothing).  `accept_grad_scale` gives any other torch optimizer the same two.

The schedules are DeepSpeed's five, as pure laws of the number of applied updates.

`make_optimizer` and `make_schedule` build both from the names and options of a DeepSpeed config.
"""

from .adam import Adam, AdamW
from .build import make_optimizer
from .errors import NotAvailableYetError, UnknownNameError, UnsupportedTensorError
from .flat import FlatOptimizer
from .grad_scale import AcceptsGradScale, GradScaled, accept_grad_scale, speaks_grad_scale
from .rules import AdamMoments, adam_rule, adamw_rule, sgd_rule
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
from .sgd import SGD

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "AcceptsGradScale",
    "Adam",
    "AdamMoments",
    "AdamW",
    "FlatOptimizer",
    "GradScaled",
    "LRRangeTest",
    "LRSchedule",
    "NotAvailableYetError",
    "OneCycle",
    "Schedule",
    "UnknownNameError",
    "UnsupportedTensorError",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "accept_grad_scale",
    "adam_rule",
    "adamw_rule",
    "make_optimizer",
    "make_schedule",
    "sgd_rule",
    "speaks_grad_scale",
]
