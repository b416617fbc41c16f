"""Files whose linear layers are quantized: GPTQ, AWQ, compressed-tensors, and states of our own quantized modules.

The config says which method a folder has; each quantized layer is a few tensors beside each other (`x.qweight`,
`x.scales`, ...), which appear here as one, `x.weight`.  The bits are decoded by zprecision, layer by layer.

The state of a quantized module (`torch.save(module.state_dict())`, `save_pretrained`, an engine's checkpoint) has
`x.weight.header` and the parts of the codes, in any file and without a config.

Sizes and groups are those of the tensors; what the config says of them is compared with these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from zengine.inference.loading.stored import QuantizedSlice, StoredTensor, Tensors
from zprecision.quant import (
    GroupedCodes,
    PackedTensor,
    QuantizedTensor,
    read_awq,
    read_compressed,
    read_compressed_bytes,
    read_gptq,
    read_header,
)

__all__ = ["with_saved_codes", "with_whole_weights"]

_HEADER = ".header"
_PARTS = ("header", "panels", "codes", "scales", "mins", "supers")
_MOST_HEADER_BYTES = 1 << 12
_MOST_SIZE = 1 << 32  # of a dim that a file names

Parts = Mapping[str, StoredTensor]


@attrs.frozen(eq=False)
class _Method:
    """A quantization method of a folder."""

    marker: str  # name of the tensor that every quantized layer has
    parts: tuple[str, ...]  # names of all its tensors
    shape: Callable[[Parts], tuple[int, int]]  # of the weight, (out, in)
    read: Callable[[Parts, tuple[int, int]], GroupedCodes]


def with_whole_weights(tensors: Tensors, config: Mapping[str, Any], origin: str) -> Tensors:
    """Return `tensors` with one weight in place of the parts of each quantized layer.

    config: `quantization_config` of the folder's config.json; {}: the folder is not quantized.

    Raises ValueError for a method, layout or number of bits that is not read, and layers with missing parts.
    """
    if not config:
        return tensors
    method = _method(config, origin)
    layers = [name.removesuffix(f".{method.marker}") for name in tensors if name.endswith(f".{method.marker}")]
    if not layers:
        raise ValueError(
            f"{origin}: its config names {config.get('quant_method')!r}, but no layer has {method.marker}"
        )
    found: dict[str, StoredTensor] = dict(tensors)
    for layer in layers:
        names = [part for part in method.parts if f"{layer}.{part}" in found]
        parts = {part: found.pop(f"{layer}.{part}") for part in names}
        if f"{layer}.weight" in found:
            raise ValueError(f"{origin} has both {layer}.weight and {layer}.{method.marker}")
        try:
            shape = method.shape(parts)
        except ValueError as error:
            raise ValueError(f"{origin}: {layer}: {error}") from error
        found[f"{layer}.weight"] = QuantizedSlice(
            f"{origin}: {layer}", shape, functools.partial(method.read, parts, shape)
        )
    return found


def with_saved_codes(tensors: Tensors, origin: str) -> Tensors:
    """Return `tensors` with one weight in place of the header and parts of each layer that was saved quantized.

    Raises ValueError for a damaged header.
    """
    layers = [name.removesuffix(_HEADER) for name in tensors if name.endswith(_HEADER)]
    if not layers:
        return tensors
    found: dict[str, StoredTensor] = dict(tensors)
    for layer in layers:
        names = [part for part in _PARTS if f"{layer}.{part}" in found]
        parts = {part: found.pop(f"{layer}.{part}") for part in names}
        where = f"{origin}: {layer}"
        try:
            shape = _saved_shape(parts)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        found[layer] = QuantizedSlice(where, shape, functools.partial(_saved_codes, parts))
    return found


def _saved_shape(parts: Parts) -> tuple[int, ...]:
    stored = parts["header"]
    if len(stored.get_shape()) != 1:
        raise ValueError(f"'header' must be a row of bytes, and is {tuple(stored.get_shape())}")
    return read_header({"header": stored[:_MOST_HEADER_BYTES]})[1]


def _saved_codes(parts: Parts) -> QuantizedTensor:
    whole = _whole(parts)
    return (
        PackedTensor.from_state_dict(whole).unpack() if "panels" in whole else QuantizedTensor.from_state_dict(whole)
    )


def _method(config: Mapping[str, Any], origin: str) -> _Method:
    name = str(config.get("quant_method", "")).lower()
    make = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed}.get(name)
    if make is None:
        raise ValueError(
            f"{origin} is quantized by {name or 'an unnamed method'!r}: gptq, awq and compressed-tensors are read; "
            "export plain weights (bfloat16), and pass format= to quantize them"
        )
    try:
        return make(config)
    except ValueError as error:
        raise ValueError(f"{origin}: its {name} layout cannot be read: {error}") from error


def _whole(parts: Parts) -> dict[str, Tensor]:
    return {name: part[...] for name, part in parts.items()}


def _sizes(parts: Parts, name: str) -> Sequence[int]:
    if name not in parts:
        raise ValueError(f"'{name}' is missing")
    sizes = parts[name].get_shape()
    if len(sizes) != 2:
        raise ValueError(f"'{name}' must be a matrix, and is {tuple(sizes)}")
    return sizes


def _number(config: Mapping[str, Any], key: str, default: int) -> int:
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{key} is {value!r}, and must be a whole number")
    return value


def _group(config: Mapping[str, Any]) -> int | None:
    size = _number(config, "group_size", 128)
    if size != -1 and size < 1:
        raise ValueError(f"group_size is {size}, and must be positive, or -1 for one group")
    return None if size == -1 else size


# -- methods ---------------------------------------------------------------------------------------


def _gptq(config: Mapping[str, Any]) -> _Method:
    bits, group = _number(config, "bits", 4), _group(config)
    layout = config.get("checkpoint_format", "gptq")
    offsets = {"gptq": 1, "gptq_v2": 0}
    if bits not in (4, 8):
        raise ValueError(f"{bits} bits; 4 and 8 are read")
    if layout not in offsets:
        raise ValueError(f"checkpoint_format {layout!r}; gptq and gptq_v2 are read")

    def shape(parts: Parts) -> tuple[int, int]:
        words, outputs = _sizes(parts, "qweight")
        return outputs, words * (32 // bits)

    def read(parts: Parts, _shape: tuple[int, int]) -> GroupedCodes:
        return read_gptq(_whole(parts), bits=bits, group=group, zero_offset=offsets[layout])

    return _Method("qweight", ("qweight", "qzeros", "scales", "g_idx"), shape, read)


def _awq(config: Mapping[str, Any]) -> _Method:
    bits, group, layout = _number(config, "bits", 4), _group(config), str(config.get("version", "gemm")).lower()
    if bits != 4:
        raise ValueError(f"{bits} bits; 4 are read")
    if layout != "gemm":
        raise ValueError(f"version {layout!r}; gemm is read")

    def shape(parts: Parts) -> tuple[int, int]:
        inputs, words = _sizes(parts, "qweight")
        return words * 8, inputs

    def read(parts: Parts, _shape: tuple[int, int]) -> GroupedCodes:
        return read_awq(_whole(parts), group=group)

    return _Method("qweight", ("qweight", "qzeros", "scales"), shape, read)


def _compressed(config: Mapping[str, Any]) -> _Method:
    groups = config.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, Mapping) else []
    layouts = {config.get("format"), *(each.get("format") for each in schemes if isinstance(each, Mapping))} - {None}
    if not layouts or not layouts <= {"pack-quantized", "int-quantized", "naive-quantized"} or len(layouts) > 1:
        named = ", ".join(sorted(map(str, layouts))) or "unnamed"
        raise ValueError(f"format {named}; pack-quantized and int-quantized are read")
    weights = [each.get("weights") for each in schemes if isinstance(each, Mapping)]
    for each in weights:
        if not isinstance(each, Mapping) or each.get("type", "int") != "int" or each.get("num_bits") not in (4, 8):
            raise ValueError(f"weights of {each!r}; integers of 4 and 8 bits are read")
    widths = sorted({each["num_bits"] for each in weights if isinstance(each, Mapping)})
    if not widths:
        raise ValueError("config_groups is missing")
    if layouts != {"pack-quantized"}:
        return _compressed_bytes()

    def shape(parts: Parts) -> tuple[int, int]:
        outputs, _ = _sizes(parts, "weight_packed")
        if "weight_shape" not in parts or list(parts["weight_shape"].get_shape()) != [2]:
            raise ValueError("'weight_shape' must hold two numbers")
        sizes = parts["weight_shape"][...]
        if sizes.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"'weight_shape' must be whole numbers, and is {sizes.dtype}")
        named = [int(size) for size in sizes.tolist()]
        if named[0] != outputs or not 0 < named[1] < _MOST_SIZE:
            raise ValueError(f"'weight_shape' says {tuple(named)}, and 'weight_packed' has {outputs} rows")
        return named[0], named[1]

    def read(parts: Parts, shape: tuple[int, int]) -> GroupedCodes:
        words = _sizes(parts, "weight_packed")[1]
        fitting = [bits for bits in widths if words == -(-shape[1] * bits // 32)]
        if not fitting:
            raise ValueError(f"'weight_packed' has {words} words a row, which no {widths} bits for {shape} give")
        return read_compressed(_whole(parts), bits=fitting[0], shape=shape)

    names = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
    return _Method("weight_packed", names, shape, read)


def _compressed_bytes() -> _Method:
    """Codes of a byte each."""

    def shape(parts: Parts) -> tuple[int, int]:
        outputs, inputs = _sizes(parts, "weight")
        return outputs, inputs

    def read(parts: Parts, _shape: tuple[int, int]) -> GroupedCodes:
        return read_compressed_bytes(_whole(parts))

    # scales of activations are left out: products here round activations by their own
    names = ("weight", "weight_scale", "weight_zero_point", "weight_g_idx", "input_scale", "input_zero_point")
    return _Method("weight_scale", names, shape, read)
