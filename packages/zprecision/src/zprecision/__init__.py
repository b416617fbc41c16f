"""Precision policies, loss scaling and one-pass gradient inspection for PyTorch.

Three parts that meet in one training step and know nothing of each other: `Precision` says which dtype each
number has, a `Scaler` multiplies the loss and moves its factor, `inspect` looks at the gradients once and tells
what the step needs (norm and finiteness). None needs a process group, an engine or a config; where ranks must
agree, `inspect` takes an all_reduce as a callable.
"""

from zprecision.float8 import Float8, Float8Linear, has_float8
from zprecision.inlets import WideBuffers
from zprecision.inspect import Culprit, GradientStats, clip_divisor, divisor_of, first_nonfinite, inspect, joined
from zprecision.islands import Islands
from zprecision.keeping import Keep
from zprecision.policy import BF16, FP16, FP32, Precision, measure_bf16_speedup
from zprecision.rules import DynamicScaling, Scaling, StaticScaling, Unscaled
from zprecision.scaling import DynamicScaler, NoScaling, Scaler, StaticScaler, make_scaler

__version__ = "0.2.0"

__all__ = [
    "BF16",
    "FP16",
    "FP32",
    "Culprit",
    "DynamicScaler",
    "DynamicScaling",
    "Float8",
    "Float8Linear",
    "GradientStats",
    "Islands",
    "Keep",
    "NoScaling",
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
    "joined",
    "make_scaler",
    "measure_bf16_speedup",
]
