"""Filling a module from files, its linear layers quantized one by one.

Problem.  A model that fits into memory quantized need not fit before.  Design.  The module starts on the meta device,
without memory.  Each linear layer is read, quantized, packed and put in place before the next is read; what remains
(embeddings, norms, biases) gets memory at the end.  So the peak is the loaded model and one layer at work.  Layers
whose files hold codes that a format of ours represents exactly keep these codes.

Four bits do not suit every layer: as in `zengine.inference.quantized`, one whose error is over three times the median
is read once more and gets eight.

Rejected: hooks that quantize parameters as a loader assigns them (the loader must not know the order of layers, but
tied weights and fused layers make it matter).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import final

import attrs
import torch
from torch import Tensor, nn

import zpartition
from zengine.inference.loading import weights
from zengine.inference.loading.stored import Box, StoredTensor, Tensors, exact_codes
from zengine.inference.quantized import OUTLIER, LayerError, QuantizationReport, quantize_weight
from zengine.inference.quantized_modules import linear_weights, put_quantized
from zengine.progress import progress
from zprecision.quant import Format, Int8, format_name, pack

__all__ = ["ChooseFormat", "stream"]

ChooseFormat = Callable[[str], Format | None]  # from the name of a layer to its format; None: not quantized here

_BITS = {"int4": 4, "q4_0": 4, "q4_k": 4, "nf4": 4, "q6_k": 6}  # of a code; 8 in other formats
_CHUNK_NUMEL = 1 << 24  # elements of a plain tensor that are read at once


@torch.no_grad()
def stream(
    module: nn.Module, tensors: Tensors, choose: ChooseFormat, device: torch.device, *, outliers: bool = True
) -> QuantizationReport:
    """Fill `module` from `tensors`, quantizing its linear layers on the way; return a row for each of them.

    module: on the meta device, or with memory that is overwritten; its parameters have the dtypes that they get.  Its
        experts may be those of an expert rank; its layers are whole.
    tensors: all its parameters and persistent buffers, by its own names; a tied one under any of its names.
    choose: the format of each linear layer; None leaves it as the file has it: plain, or with its codes.
    outliers: give eight bits to layers of fewer bits whose error is over three times the median.

    Raises ValueError for names and shapes that do not fit, with nothing changed, and for damaged quantized layers.
    """
    zpartition.check_slices(module, tensors)
    layers = tuple(_Layer(name, _is_transposed(layer, weight)) for name, layer, weight in linear_weights(module))
    if any(not layer.name for layer in layers):
        raise ValueError(f"{type(module).__name__} is one layer; pass the module that contains it")
    filling = _LayerFiller(tensors, _aliases(module), device)
    rows: dict[str, LayerError] = {}
    with progress("loading layers", len(layers)) as advance:
        for layer in layers:
            row = filling.place(module, layer, choose(layer.name))
            rows |= {layer.name: row} if row else {}
            advance()
    kept = _outliers(rows) if outliers else []
    for layer in layers:
        if layer.name in kept:
            rows[layer.name] = filling.quantize(module, layer, Int8())
    weights.materialize(module, device)
    addresses = zpartition.addresses_of(module)
    for name, tensor in weights.stored_tensors(module):
        _copy_part(filling.source(name), tensor, name, addresses.get(name))
    return QuantizationReport(layers=tuple(rows.values()), kept=tuple(kept))


@attrs.frozen
class _Layer:
    """A linear layer."""

    name: str
    is_transposed: bool  # its weight is (in, out)


@final
@attrs.frozen(eq=False)
class _LayerFiller:
    """Files, and where the parts of one module are in them."""

    tensors: Tensors
    aliases: Mapping[str, tuple[str, ...]]  # name of a parameter -> all its names
    device: torch.device

    def source(self, name: str) -> StoredTensor:
        """Return the tensor of a parameter or buffer, under its own name or another that the files have."""
        names = (name, *self.aliases.get(name, ()))
        return next(self.tensors[each] for each in names if each in self.tensors)

    def place(self, module: nn.Module, layer: _Layer, format: Format | None) -> LayerError | None:
        """Replace a layer by a quantized one, with the file's codes if they are exact; None if it stays."""
        codes = None if layer.is_transposed else exact_codes(self.source(f"{layer.name}.weight"))
        if codes is None or (format is not None and _bits(codes.format) > _bits(format)):
            del codes
            return None if format is None else self.quantize(module, layer, format)
        packed = pack(codes)
        put_quantized(module, layer.name, packed.to(self.device))
        return LayerError(name=layer.name, format=format_name(codes.format), error=0.0, nbytes=packed.nbytes)

    def quantize(self, module: nn.Module, layer: _Layer, format: Format) -> LayerError:
        """Replace a layer by one whose weight is quantized from its values."""
        values = self.source(f"{layer.name}.weight")[...]
        _check_floating(values, f"{layer.name}.weight")
        packed, row = quantize_weight(layer.name, values.t() if layer.is_transposed else values, format)
        put_quantized(module, layer.name, packed.to(self.device))
        return row


def _is_transposed(layer: nn.Module, weight: Tensor) -> bool:
    """Return True for Transformers' Conv1D; weight: (out, in)."""
    own = layer.weight
    assert isinstance(own, Tensor)
    return weight.stride() != own.stride() or weight.shape != own.shape


def _aliases(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return all names of each parameter, by each of them."""
    names: dict[int, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return {name: tuple(each) for each in names.values() for name in each}


def _outliers(rows: Mapping[str, LayerError]) -> list[str]:
    """Return the layers of fewer than eight bits whose error is over three times the median of their format."""
    errors: dict[str, list[float]] = {}
    for row in rows.values():
        if row.error > 0 and _bits(row.format) < 8:
            errors.setdefault(row.format, []).append(row.error)
    limits = {format: OUTLIER * statistics.median(each) for format, each in errors.items()}
    return [name for name, row in rows.items() if row.error > limits.get(row.format, float("inf"))]


def _bits(format: Format | str) -> int:
    """Return the bits of a code."""
    name = format if isinstance(format, str) else format_name(format)
    return _BITS.get(name.partition("-")[0], 8)


def _copy_part(stored: StoredTensor, tensor: Tensor, name: str, address: zpartition.Address | None) -> None:
    """Read a plain tensor, or the part of it at an address: that of an expert rank."""
    if address is None or address.global_shape == tuple(tensor.shape):
        _copy(stored, tensor, name)
        return
    first = 0
    for box in address.boxes:
        size = box[0][1] - box[0][0]
        _copy(Box(stored, box), tensor[first : first + size], name)
        first += size


def _copy(stored: StoredTensor, tensor: Tensor, name: str) -> None:
    """Read a plain tensor, a few rows at a time."""
    if not tensor.dim():
        tensor.copy_(stored[...])
        return
    step = max(1, _CHUNK_NUMEL * tensor.shape[0] // max(1, tensor.numel()))
    for first in range(0, tensor.shape[0], step):
        rows = stored[first : first + step]
        if tensor.is_floating_point():
            _check_floating(rows, name)
        tensor[first : first + step].copy_(rows)


def _check_floating(values: Tensor, name: str) -> None:
    """Raise ValueError for whole numbers: they are codes, whose scales are not known."""
    if not values.is_floating_point():
        raise ValueError(
            f"{name} is {values.dtype} in the files, and must be of floating point: codes of another quantization "
            "without their config are not read"
        )
