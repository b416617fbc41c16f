"""Quantized tensors: codes, scales and a logical shape.

A `QuantizedTensor` holds plain tensors in an order that a reader can follow: codes by row, two nibbles a byte
(element j of a run of 32 in the low half of byte j, element j + 16 in the high half, as GGML does), scales by row and
group.  So rows and whole groups can be cut by views, and everything can be saved as plain tensors.  For products the
kernels read another order, which `pack` makes (panels.py).

Rejected: a subclass of torch.Tensor (every operation on it would need an answer, and most have none).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor

from zprecision.quant.decode import decode
from zprecision.quant.formats import Format, format_name, format_named, unit_of
from zprecision.quant.gpu import decode_integers
from zprecision.quant.layout import PARTS, part_dtypes, part_lengths

__all__ = ["Quantized", "QuantizedTensor", "assemble", "checked", "read_header", "write_header"]

_MOST_HEADER_BYTES = 4096
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@runtime_checkable
class Quantized(Protocol):
    """The least that code which shards weights must know of a quantized tensor."""

    @property
    def codes(self) -> Tensor:
        """Return the codes."""

    @property
    def scales(self) -> Tensor:
        """Return the scales."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the logical shape."""

    @property
    def unit(self) -> int:
        """Return the elements of the last dim that cannot be parted."""

    def narrow(self, dim: int, start: int, length: int) -> Quantized:
        """Return a part of it, cut between groups."""

    def join(self, others: Sequence[Any], dim: int = 0) -> Quantized:
        """Return it and `others`, one after the other along a dim, in new memory."""

    def parts(self) -> dict[str, Tensor]:
        """Return the tensors that it consists of, by name."""


@attrs.frozen(eq=False, kw_only=True)
class QuantizedTensor:
    """A tensor in a `Format`.

    Rows are padded with zeros to whole units of the format; `shape` is without the padding.  All parts have the
    leading dims of `shape` and one last dim.
    """

    format: Format
    shape: tuple[int, ...]  # logical: of the tensor that was quantized
    dtype: torch.dtype  # of the tensor that was quantized; `dequantize` returns it
    codes: Tensor  # uint8, int8 or 8-bit float: by row
    scales: Tensor  # by row and group; in Q4_K and Q6_K integers
    mins: Tensor | None = None  # as scales; of asymmetric formats
    supers: Tensor | None = None  # (..., 2 or 1 a block of 256) float16: the scales of scales and minima

    @property
    def nbytes(self) -> int:
        """Return the bytes of all parts."""
        return sum(part.nbytes for part in self.parts().values())

    @property
    def device(self) -> torch.device:
        """Return the device of all parts."""
        return self.codes.device

    @property
    def bits_per_weight(self) -> float:
        """Return the bits of all parts by logical element."""
        return 8 * self.nbytes / max(1, math.prod(self.shape))

    def narrow(self, dim: int, start: int, length: int) -> QuantizedTensor:
        """Return the part [start, start + length) of dim `dim`, as views.

        In the last dim, both ends must be multiples of `unit_of(format)`, or the end of the row. Raises ValueError.
        """
        dim, last = dim % len(self.shape), len(self.shape) - 1
        size = self.shape[dim]
        if start < 0 or length < 0 or start + length > size:
            raise ValueError(f"narrow({dim}, {start}, {length}): the dim has {size} elements")
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        if dim != last:
            cut = {name: part.narrow(dim, start, length) for name, part in self.parts().items()}
            return assemble(self.format, shape, self.dtype, cut)
        unit, end = unit_of(self.format), start + length
        if start % unit or (end % unit and end != size):
            raise ValueError(
                f"narrow({dim}, {start}, {length}): {format_name(self.format)} is cut at multiples of {unit} elements"
            )
        lengths = part_lengths(self.format, size)
        first, count = start // unit, -(-length // unit)
        cut = {}
        for name, part in self.parts().items():
            each = lengths[name] // max(1, -(-size // unit))  # 0: one scale for the whole row
            cut[name] = part.narrow(last, first * each, count * each) if each else part
        return assemble(self.format, shape, self.dtype, cut)

    @property
    def unit(self) -> int:
        """Return the elements of the last dim that cannot be parted: a group, or a block of 256."""
        return unit_of(self.format)

    def join(self, others: Sequence[QuantizedTensor], dim: int = 0) -> QuantizedTensor:
        """Return it and `others`, one after the other along dim `dim`, in new memory: the inverse of `narrow`.

        Raises ValueError for other formats and shapes, for parts that end inside a group, and, in the last dim, for
        rows with one scale that are not the same row's.
        """
        tensors, last = [self, *others], len(self.shape) - 1
        dim = dim % len(self.shape)
        _check_joined(tensors, dim)
        shape = (*self.shape[:dim], sum(each.shape[dim] for each in tensors), *self.shape[dim + 1 :])
        lengths = part_lengths(self.format, shape[last])
        found = {}
        for name, part in self.parts().items():
            pieces = [each.parts()[name] for each in tensors]
            is_shared = dim == last and part.shape[last] == lengths[name] == 1 and len(pieces) > 1  # a scale a row
            if is_shared and not all(torch.equal(part, piece) for piece in pieces):
                raise ValueError(f"join: rows of {format_name(self.format)} have one scale, and these have several")
            found[name] = part.clone() if is_shared else torch.cat(pieces, dim)
        return assemble(self.format, shape, self.dtype, found)

    def map(self, function: Callable[[Tensor], Tensor]) -> QuantizedTensor:
        """Return it with `function(part)` for every part, e.g. `Tensor.contiguous`."""
        parts = {name: function(part) for name, part in self.parts().items()}
        return assemble(self.format, self.shape, self.dtype, parts)

    def to(self, device: torch.device | str) -> QuantizedTensor:
        """Return it on another device."""
        return self.map(lambda part: part.to(device))

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values, in `dtype`, by default that of the tensor that was quantized."""
        wanted = dtype or self.dtype
        found = decode_integers(self.format, self.shape, self.parts(), wanted)
        return decode(self.format, self.shape, self.parts()).to(wanted) if found is None else found

    def state_dict(self) -> dict[str, Tensor]:
        """Return plain contiguous tensors, for safetensors or a checkpoint; "header" is JSON text as uint8."""
        return {
            "header": write_header(self.format, self.shape, self.dtype),
            **{name: part.contiguous() for name, part in self.parts().items()},
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor]) -> QuantizedTensor:
        """Return the tensor of a `state_dict`.  Trusts nothing: raises ValueError for parts that do not fit."""
        format, shape, dtype = read_header(state)
        return checked(format, shape, dtype, {name: part for name, part in state.items() if name != "header"})

    def parts(self) -> dict[str, Tensor]:
        """Return the parts that the format has, by name."""
        held = [(name, getattr(self, name)) for name in PARTS]
        return {name: part for name, part in held if part is not None}


def _check_joined(tensors: Sequence[QuantizedTensor], dim: int) -> None:
    """Raise ValueError for tensors that cannot be joined."""
    first, last = tensors[0], len(tensors[0].shape) - 1
    for each in tensors[1:]:
        others = [tuple(size for at, size in enumerate(shape) if at != dim) for shape in (first.shape, each.shape)]
        if each.format != first.format or len(each.shape) != len(first.shape) or others[0] != others[1]:
            raise ValueError(
                f"join along dim {dim}: {format_name(first.format)} of {first.shape} and {format_name(each.format)} "
                f"of {each.shape}; format and other dims must be equal"
            )
    if dim == last and (wrong := [each.shape[dim] for each in tensors[:-1] if each.shape[dim] % first.unit]):
        raise ValueError(f"join: a part of {wrong[0]} elements ends inside a group of {first.unit}")


def write_header(format: Format, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return format, shape and dtype as JSON text in uint8."""
    header = {"format": format_name(format), "shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}
    return torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)


def read_header(state: Mapping[str, Tensor]) -> tuple[Format, tuple[int, ...], torch.dtype]:
    """Return what `write_header` wrote: `state["header"]` is 1-D uint8.  Raises ValueError for anything else."""
    text = state.get("header")
    if text is None or text.dtype != torch.uint8 or text.dim() != 1 or text.numel() > _MOST_HEADER_BYTES:
        raise ValueError(f"no quantized tensor: it has no 'header' of uint8, only {sorted(state)}")
    try:
        header = json.loads(bytes(text.tolist()).decode())
        format, shape, dtype = format_named(header["format"]), header["shape"], _DTYPES[header["dtype"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the header of a quantized tensor is damaged: {error}") from error
    if not isinstance(shape, list) or not shape or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"the header of a quantized tensor has the shape {shape!r}: it must list integers >= 0")
    if not shape[-1]:
        raise ValueError(f"the header of a quantized tensor has the shape {shape!r}: its rows are empty")
    return format, tuple(shape), dtype


def assemble(
    format: Format, shape: Sequence[int], dtype: torch.dtype, parts: Mapping[str, Tensor]
) -> QuantizedTensor:
    """Return a quantized tensor of parts that are known to fit."""
    mins, supers = parts.get("mins"), parts.get("supers")
    return QuantizedTensor(
        format=format,
        shape=tuple(shape),
        dtype=dtype,
        codes=parts["codes"],
        scales=parts["scales"],
        mins=mins,
        supers=supers,
    )


def checked(format: Format, shape: Sequence[int], dtype: torch.dtype, parts: Mapping[str, Tensor]) -> QuantizedTensor:
    """Return a quantized tensor of `parts`.  Raises ValueError if one is missing, or has another dtype or shape."""
    lengths, dtypes = part_lengths(format, shape[-1]), part_dtypes(format)
    if sorted(parts) != sorted(lengths):
        raise ValueError(f"{format_name(format)} has the parts {sorted(lengths)}, and these are {sorted(parts)}")
    for name, part in parts.items():
        wanted = (*shape[:-1], lengths[name])
        if tuple(part.shape) != wanted or part.dtype != dtypes[name]:
            raise ValueError(
                f"'{name}' of {format_name(format)} for the shape {tuple(shape)} must be {dtypes[name]} of "
                f"{wanted}, and is {part.dtype} of {tuple(part.shape)}"
            )
    return assemble(format, shape, dtype, parts)
