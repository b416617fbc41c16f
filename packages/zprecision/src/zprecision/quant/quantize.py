"""`quantize` and `dequantize`, the verbs of block quantization."""

from __future__ import annotations

import torch
from torch import Tensor

from zprecision.quant import gpu
from zprecision.quant.encode import encode
from zprecision.quant.formats import Format, format_named
from zprecision.quant.kernels import encode_integers
from zprecision.quant.panels import PackedTensor
from zprecision.quant.tensor import QuantizedTensor, assemble

__all__ = ["dequantize", "quantize"]


def quantize(tensor: Tensor, format: Format | str) -> QuantizedTensor:
    """Return `tensor`, (..., K) of a floating dtype on any device, in `format`: a value, or its text ("int4-g64").

    Groups lie along the last dim. Every row is quantized by itself, so parts of a tensor may be quantized one by one.
    Scales of the integer formats are float16: groups whose largest magnitude is below about 1e-5 lose precision, and
    become zero below 4e-6.

    Raises ValueError for values that are not finite or too large for the scales, for empty rows, and for the meta
    device; TypeError for another dtype.

    >>> import torch, zprecision
    >>> weight = torch.arange(64.0).reshape(2, 32)
    >>> codes = zprecision.quantize(weight, "int8")
    >>> tuple(codes.shape), codes.nbytes < weight.nbytes / 3
    ((2, 32), True)
    """
    if not tensor.is_floating_point():
        raise TypeError(f"quantize: the tensor is {tensor.dtype}; pass a floating dtype")
    if tensor.is_meta:
        raise ValueError(
            f"quantize: the tensor, {tuple(tensor.shape)}, is on the meta device and has no values; load it"
        )
    if not tensor.dim():
        raise ValueError("quantize: the tensor has no dims; groups lie along the last one")
    if not tensor.shape[-1]:
        raise ValueError(f"quantize: the tensor is {tuple(tensor.shape)}: its rows are empty")
    form = format_named(format) if isinstance(format, str) else format
    if not isinstance(form, Format):
        raise TypeError(
            f"quantize: the format is {format!r}; pass its text, such as 'int4', or a value, zprecision.Int4()"
        )
    with torch.no_grad():
        values = tensor.detach()
        by_kernels = encode_integers(values, form) or gpu.encode_integers(values, form)
        parts = by_kernels or encode(values, form)  # which explains failures
    return assemble(form, tensor.shape, tensor.dtype, parts)


def dequantize(quantized: QuantizedTensor | PackedTensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the values of a quantized tensor, in `dtype`, by default that of the tensor that was quantized.

    >>> import torch, zprecision
    >>> weight = torch.arange(64.0).reshape(2, 32)
    >>> again = zprecision.dequantize(zprecision.quantize(weight, "int8"))
    >>> bool((again - weight).abs().max() < 0.3)
    True
    """
    return quantized.dequantize(dtype)
