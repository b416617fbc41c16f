"""Precision policies, loss scaling, one-pass gradient inspection and block quantization for PyTorch.

Independent parts.  Three meet in one training step: `Precision` sets the dtype of each tensor, a `Scaler` multiplies
the loss and adapts its factor, `inspect` reads the gradients once and returns norm and finiteness.  `quantize` stores
weights in 4 to 8 bits, and `linear` multiplies by them.  None needs a process group, an engine or a config; across
ranks, `inspect` takes an all_reduce as a callable.
"""

import importlib
import sys
from typing import TYPE_CHECKING

from zprecision.backends.native import Kernels, kernels
from zprecision.curvature import (
    Eigenvalue,
    PowerIteration,
    block_eigenvalues,
    hessian_product,
    largest_eigenvalue,
    relative_eigenvalues,
)
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

if TYPE_CHECKING:  # imported by the first use of a name: see __getattr__
    from zprecision.quant import (
        NF4,
        Q4_0,
        Q4_K,
        Q6_K,
        Q8_0,
        Format,
        Fp8,
        Int4,
        Int8,
        PackedTensor,
        Quantized,
        QuantizedTensor,
        Weight,
        dequantize,
        format_name,
        format_named,
        from_blocks,
        linear,
        linear_many,
        pack,
        quantize,
        quantize_activations,
        to_blocks,
    )

__version__ = "0.3.0"

__all__ = [
    "BF16",
    "FP16",
    "FP32",
    "NF4",
    "Q4_0",
    "Q4_K",
    "Q6_K",
    "Q8_0",
    "DynamicScaler",
    "DynamicScaling",
    "Eigenvalue",
    "Float8",
    "Float8Linear",
    "Format",
    "Fp8",
    "Fp32Modules",
    "GradientStats",
    "Int4",
    "Int8",
    "KeepInFp32",
    "Kernels",
    "NoScaling",
    "NonFiniteGradient",
    "PackedTensor",
    "PowerIteration",
    "Precision",
    "Quantized",
    "QuantizedTensor",
    "Scaler",
    "Scaling",
    "StaticScaler",
    "StaticScaling",
    "Unscaled",
    "Weight",
    "WideBuffers",
    "block_eigenvalues",
    "clip_divisor",
    "dequantize",
    "divisor_of",
    "first_nonfinite",
    "format_name",
    "format_named",
    "from_blocks",
    "has_float8",
    "hessian_product",
    "inspect",
    "kernels",
    "largest_eigenvalue",
    "linear",
    "linear_many",
    "make_scaler",
    "measure_bf16_speedup",
    "merge_stats",
    "pack",
    "quantize",
    "quantize_activations",
    "relative_eigenvalues",
    "to_blocks",
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
        if name in __all__:  # of block quantization, which costs an import of zprecision nothing
            return globals().setdefault(name, getattr(importlib.import_module("zprecision.quant"), name))
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
