"""Packed weights: the order of bytes that the product kernels read.

A core reads memory slower than it multiplies, so a product with one token must read every byte once, in order, and
need no reordering in registers.  Sixteen rows form a panel.  A panel is a sequence of groups; a group has the scales
of its 16 rows, their minima, if any, and its codes: vectors of 64 bytes whose lane r, 4 bytes, belongs to row r.

    8 bits   vector j of a block of 32: unsigned codes 4j .. 4j+3
    4 bits   vector j of a block of 32: codes 8j .. 8j+3 in the low nibbles, 8j+4 .. 8j+7 in the high ones

So each lane sums one row, scales are loaded as one vector, and nothing is added across lanes.  The order is the same
for every instruction set: a packed file serves all machines.

`pack` is exact and `unpack` its inverse.  Rejected: packing inside `quantize` (rows could not be cut by views any
more), and keeping both (twice the memory).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import Tensor

from zprecision.backends.gpu.launch import has_gpu_kernels
from zprecision.quant.decode import integer_codes
from zprecision.quant.formats import BLOCK, Format, Integers, format_name, integers, unit_of
from zprecision.quant.kernels import empty_panels, pack_panels
from zprecision.quant.layout import join_nibbles, padded, unflatten
from zprecision.quant.tensor import QuantizedTensor, checked, read_header, write_header

__all__ = ["PANEL_ROWS", "PackedTensor", "pack", "packed_once", "product_format"]

PANEL_ROWS = 16
_LANE = 4  # codes of one row in a vector


@attrs.frozen(eq=False, kw_only=True)
class PackedTensor:
    """A quantized matrix in the order of the product kernels; made by `pack`."""

    format: Format
    shape: tuple[int, int]  # logical: (out_features, in_features)
    dtype: torch.dtype  # of the tensor that was quantized
    data: Tensor  # (bytes,) uint8: the panels, one after the other

    @property
    def nbytes(self) -> int:
        """Return its bytes."""
        return self.data.nbytes

    @property
    def device(self) -> torch.device:
        """Return its device."""
        return self.data.device

    def to(self, device: torch.device | str) -> PackedTensor | QuantizedTensor:
        """Return it on another device; unpacked if the kernels there read rows, as `pack` does."""
        if has_gpu_kernels(torch.device(device)):
            return self.unpack().to(device)
        return attrs.evolve(self, data=self.data.to(device))

    @property
    def unit(self) -> int:
        """Return the elements of the last dim that cannot be parted."""
        return unit_of(self.format)

    def parts(self) -> dict[str, Tensor]:
        """Return the tensors that it consists of, by name."""
        return {"panels": self.data}

    def narrow(self, dim: int, start: int, length: int) -> PackedTensor:
        """Return the part [start, start + length) of dim `dim`: a view for whole panels of 16 rows, else a copy.

        Raises ValueError as `QuantizedTensor.narrow`.
        """
        rows, columns = self.shape
        end = start + length
        is_whole = start % PANEL_ROWS == 0 and (end % PANEL_ROWS == 0 or end == rows)
        if dim % 2 or not is_whole or not 0 <= start <= end <= rows:
            return _pack_matrix(self.unpack().narrow(dim, start, length))
        panel = self.data.numel() // max(1, _num_panels(rows))
        data = self.data[start // PANEL_ROWS * panel : _num_panels(end) * panel]
        return attrs.evolve(self, shape=(length, columns), data=data)

    def join(self, others: Sequence[PackedTensor], dim: int = 0) -> PackedTensor:
        """Return it and `others`, one after the other along dim `dim`, in new memory.  Raises ValueError."""
        if not others:
            return attrs.evolve(self, data=self.data.clone())
        return _pack_matrix(self.unpack().join([each.unpack() for each in others], dim))

    def unpack(self) -> QuantizedTensor:
        """Return the quantized tensor that was packed, bit for bit."""
        return _unpack(self)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values, in `dtype`, by default that of the tensor that was quantized."""
        return self.unpack().dequantize(dtype)

    def state_dict(self) -> dict[str, Tensor]:
        """Return plain tensors, as `QuantizedTensor.state_dict`: a packed file needs no packing when it is loaded."""
        return {"header": write_header(self.format, self.shape, self.dtype), "panels": self.data}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor]) -> PackedTensor:
        """Return the tensor of a `state_dict`.  Trusts nothing: raises ValueError for parts that do not fit."""
        format, shape, dtype = read_header(state)
        data = state.get("panels")
        form = product_format(format)
        if form is None or len(shape) != 2 or data is None or len(state) != 2:
            raise ValueError(f"no packed tensor: {format_name(format)} of {shape} with the parts {sorted(state)}")
        wanted = _num_panels(shape[0]) * _panel_bytes(form, padded(format, shape[1]))
        if data.dtype != torch.uint8 or tuple(data.shape) != (wanted,):
            raise ValueError(
                f"'panels' of {format_name(format)} for the shape {shape} must be uint8 of {(wanted,)}, and is "
                f"{data.dtype} of {tuple(data.shape)}"
            )
        return cls(format=format, shape=(shape[0], shape[1]), dtype=dtype, data=data.contiguous())


def product_format(format: Format) -> Integers | None:
    """Return the integer format that kernels multiply for `format`; None if there is none."""
    return integers(format)


def pack(quantized: QuantizedTensor) -> PackedTensor | QuantizedTensor:
    """Return a matrix (rows, columns) in the order of the kernels; other formats are returned as they are.

    So is a matrix on a CUDA device with kernels: these read the rows of a `QuantizedTensor`.

    The result is what `linear` reads fastest; drop the argument to keep one copy. Raises ValueError if it has not two
    dims.
    """
    if len(quantized.shape) != 2:
        raise ValueError(f"pack: a matrix is needed, and the shape is {quantized.shape}; pack each matrix of a stack")
    form = product_format(quantized.format)
    if form is None or has_gpu_kernels(quantized.device):
        return quantized
    rows, columns = quantized.shape
    numel = _num_panels(rows) * _panel_bytes(form, padded(quantized.format, columns))
    data = empty_panels(numel, quantized.device)
    if not pack_panels(quantized.codes, quantized.scales, quantized.mins, form, data):
        data = pack_rule(quantized, form)
    return PackedTensor(format=quantized.format, shape=(rows, columns), dtype=quantized.dtype, data=data)


def _pack_matrix(quantized: QuantizedTensor) -> PackedTensor:
    packed = pack(quantized)
    assert isinstance(packed, PackedTensor)
    return packed


def pack_rule(quantized: QuantizedTensor, form: Integers) -> Tensor:
    """Return the panels of a matrix, in torch."""
    rows = quantized.shape[0]
    codes = _whole_panels(integer_codes(quantized.format, quantized.codes), rows)
    blocks = codes.view(-1, PANEL_ROWS, codes.shape[-1] // BLOCK, BLOCK)
    if form.bits == 8:
        lanes = unflatten(blocks, BLOCK // _LANE, _LANE)
    else:
        pairs = unflatten(blocks, BLOCK // _LANE // 2, 2, _LANE)
        lanes = pairs[..., 0, :] | (pairs[..., 1, :] << 4)
    vectors = lanes.permute(0, 2, 3, 1, 4).flatten(2)  # panels, blocks, bytes
    heads = [_head(part, rows) for part in (quantized.scales, quantized.mins) if part is not None]
    groups = heads[0].shape[1]
    width = vectors.shape[1] // groups * vectors.shape[2]
    return torch.cat([*heads, vectors.reshape(vectors.shape[0], groups, width)], dim=-1).flatten()


_packed: weakref.WeakKeyDictionary[QuantizedTensor, PackedTensor | QuantizedTensor] = weakref.WeakKeyDictionary()


def packed_once(quantized: QuantizedTensor) -> PackedTensor | QuantizedTensor:
    """Return `pack(quantized)`, kept as long as the argument lives."""
    found = _packed.get(quantized)
    if found is None:
        found = _packed[quantized] = pack(quantized)
    return found


def _num_panels(rows: int) -> int:
    return -(-rows // PANEL_ROWS)


def _panel_bytes(form: Integers, length: int) -> int:
    groups = length // form.group if form.group else 1
    per_scale = 2 if form.group else 4
    heads = groups * per_scale * (1 if form.is_symmetric else 2)
    return PANEL_ROWS * (heads + length * form.bits // 8)


def _whole_panels(part: Tensor, rows: int) -> Tensor:
    """Add rows of zeros up to a whole number of panels."""
    return torch.nn.functional.pad(part, (0, 0, 0, _num_panels(rows) * PANEL_ROWS - rows))


def _head(part: Tensor, rows: int) -> Tensor:
    """Return (panels, groups, bytes) of the scales or minima of 16 rows."""
    by_panel = _whole_panels(part, rows).view(-1, PANEL_ROWS, part.shape[-1])
    return by_panel.transpose(1, 2).contiguous().view(torch.uint8)


def _unpack(packed: PackedTensor) -> QuantizedTensor:
    form = product_format(packed.format)
    assert form is not None
    rows, length = packed.shape[0], padded(packed.format, packed.shape[1])
    groups = length // form.group if form.group else 1
    narrow = torch.float16 if form.group else torch.float32
    panels = packed.data.view(_num_panels(rows), groups, _panel_bytes(form, length) // groups)
    width = PANEL_ROWS * narrow.itemsize
    names = ("scales",) if form.is_symmetric else ("scales", "mins")
    parts = {
        name: _tail(panels[..., index * width : (index + 1) * width], narrow, rows)
        for index, name in enumerate(names)
    }
    vectors = panels[..., len(names) * width :].reshape(
        _num_panels(rows), length // BLOCK, form.bits, PANEL_ROWS, _LANE
    )
    lanes = vectors.permute(0, 3, 1, 2, 4)
    if form.bits == 4:
        lanes = torch.stack([lanes & 15, lanes >> 4], dim=-2)
    codes = lanes.reshape(-1, length)[:rows]
    parts["codes"] = join_nibbles(codes) if form.bits == 4 else codes
    if form.bits == 8 and form.is_symmetric:
        parts["codes"] = (codes ^ 128).view(torch.int8)
    return checked(packed.format, packed.shape, packed.dtype, parts)


def _tail(head: Tensor, dtype: torch.dtype, rows: int) -> Tensor:
    values = head.contiguous().view(dtype)  # panels, groups, rows
    return values.transpose(1, 2).reshape(-1, values.shape[1])[:rows].contiguous()
