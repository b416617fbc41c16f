"""Precision policies, loss scaling and one-pass gradient inspection for PyTorch.

Three independent parts that meet in one training step: `Precision` sets the dtype of each tensor, a `Scaler`
multiplies the loss and adapts its factor, `inspect` reads the gradients once and returns norm and finiteness.  None
needs a process group, an engine or a config; across ranks, `inspect` takes an all_reduce as a callable.
"""

import sys
from typing import TYPE_CHECKING

from zprecision.float8 import Float8, Float8Linear, has_float8
from zprecision.fp32_modules import Fp32Modules
from zprecision.inspect import (
    GradientStats,
    NonFiniteGradient,
    clip_divisor,
    divisor_of,
    first_nonfinite,
    inspect,
    merge_stats,
)
from zprecision.keep_in_fp32 import KeepInFp32
from zprecision.policy import BF16, FP16, FP32, Precision, measure_bf16_speedup
from zprecision.rules import DynamicScaling, Scaling, StaticScaling, Unscaled
from zprecision.scaling import DynamicScaler, NoScaling, Scaler, StaticScaler, make_scaler
from zprecision.wide_buffers import WideBuffers

__version__ = "0.3.0"

__all__ = [
    "BF16",
    "FP16",
    "FP32",
    "DynamicScaler",
    "DynamicScaling",
    "Float8",
    "Float8Linear",
    "Fp32Modules",
    "GradientStats",
    "KeepInFp32",
    "NoScaling",
    "NonFiniteGradient",
    "Precision",
    "Scaler",
    "Scaling",
    "StaticScaler",
    "StaticScaling",
    "Unscaled",
    "WideBuffers",
    "clip_divisor",
    "divisor_of",
    "first_nonfinite",
    "has_float8",
    "inspect",
    "make_scaler",
    "measure_bf16_speedup",
    "merge_stats",
]

RENAMED = {  # old name -> new name, for one minor version
    "Culprit": "NonFiniteGradient",
    "Islands": "Fp32Modules",
    "Keep": "KeepInFp32",
    "joined": "merge_stats",
}

if not TYPE_CHECKING:  # type checkers report old names as missing

    def __getattr__(name: str) -> object:
        if name in RENAMED:
            is_import = sys._getframe(1).f_code.co_name == "_handle_fromlist"  # of `from ... import name`
            error = ImportError if is_import else AttributeError
            raise error(f"zprecision.{name} was renamed in 0.3.0; use zprecision.{RENAMED[name]}.")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
