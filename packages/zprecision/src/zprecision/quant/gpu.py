"""Calls of the GPU kernels: arguments as structs, results as tensors on the device.

Functions return None where the kernels cannot serve: another device, no CuPy, another dtype or format.

Products of up to 32 tokens multiply integers, bit for bit as on a CPU.  For more tokens a panel of the weight is
dequantized to the dtype of the activation and multiplied by torch: arithmetic outweighs the bytes there, and the
activation is not rounded to 8 bits.  Rejected: own kernels for tensor cores (torch's reach their peak, and prompts
are a small part of generation).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import Tensor

from zprecision.backends.gpu.launch import Launcher, Program, launcher_of
from zprecision.quant.formats import BLOCK, Format, Integers, integers
from zprecision.quant.layout import padded, part_dtypes, part_lengths

__all__ = ["MOST_TOKENS", "DeviceMatrix", "decode_integers", "encode_integers", "panel_product", "products"]

MOST_TOKENS = 32  # of a product by integers: four tiles, which read the weight once from memory
MOST_MATRICES = 16  # of a launch (ZQ_MATRICES)
PANEL_NUMEL = 2**24  # dequantized at a time: stays in the cache, and is large enough for a matrix product
_ROWS, _TILE, _WARPS = 16, 8, 8  # rows of a block of threads, most tokens of one, warps
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_RULES = {"search": 0, "amax": 1, "minmax": 2, "ggml": 3}
_QUANTIZE = struct.Struct("<5Q8q")  # zq_quantize_args
_DEQUANTIZE = struct.Struct("<4Q10q")  # zq_dequantize_args
_INPUT = struct.Struct("<2Q4q")  # zq_input
_COUNTS = struct.Struct("<2q")  # of zq_products_args, before its matrices
_MATRIX = struct.Struct("<5Q9q")  # zq_matrix
_FLIP = 0x80808080  # the top bits of four codes


@attrs.frozen(kw_only=True)
class DeviceMatrix:
    """A quantized matrix as the kernels read it: rows of codes, each aligned to 16 bytes."""

    form: Integers
    rows: int
    columns: int  # logical
    codes: Tensor  # (rows, bytes) uint8 or int8; the last dim has stride 1
    scales: Tensor  # (rows, groups)
    mins: Tensor | None  # as scales

    @classmethod
    def of(cls, format: Format, shape: Sequence[int], parts: Mapping[str, Tensor]) -> DeviceMatrix | None:
        """Return the matrix of the parts of a quantized tensor, all leading dims as rows; None for other formats."""
        form = integers(format)
        if form is None or not shape:
            return None
        codes, scales, mins = (parts.get(name) for name in ("codes", "scales", "mins"))
        assert codes is not None
        assert scales is not None
        scales, mins = _rows(scales), None if mins is None else _rows(mins)
        if mins is not None and mins.stride(0) != scales.stride(0):
            scales, mins = _copied(scales), _copied(mins)
        rows, aligned = codes.shape[:-1].numel(), _rows(codes, 16)
        return cls(form=form, rows=rows, columns=shape[-1], codes=aligned, scales=scales, mins=mins)

    @property
    def blocks(self) -> int:
        """Return the blocks of 32 codes of a row."""
        return self.codes.shape[1] * 8 // self.form.bits // BLOCK

    @property
    def each(self) -> int:
        """Return the blocks of a group; 0 if a row is one group."""
        return (self.form.group or 0) // BLOCK

    def narrow(self, start: int, length: int) -> DeviceMatrix:
        """Return `length` rows from `start` on, as views."""
        codes, scales = (part.narrow(0, start, length) for part in (self.codes, self.scales))
        mins = None if self.mins is None else self.mins.narrow(0, start, length)
        return attrs.evolve(self, rows=length, codes=codes, scales=scales, mins=mins)


def _rows(part: Tensor, alignment: int = 1) -> Tensor:
    """Return (rows, length), without a copy if its rows are aligned."""
    flat = part if part.dim() == 2 else part.reshape(part.shape[:-1].numel(), part.shape[-1])
    misaligned = (flat.data_ptr() | flat.stride(0) * flat.element_size()) % alignment
    return _copied(flat) if misaligned or flat.stride(1) != 1 else flat


def _copied(part: Tensor) -> Tensor:
    return part.clone(memory_format=torch.contiguous_format)


def _address(part: Tensor | None) -> int:
    return 0 if part is None else part.data_ptr()


# Quantization and values ----------------------------------------------------------------------------------


def encode_integers(values: Tensor, format: Format, launcher: Launcher | None = None) -> dict[str, Tensor] | None:
    """Return the parts of `values`, (..., K), in an integer format; None also if they are not finite.

    Waits for the device, which knows whether they are.
    """
    form, launcher = integers(format), launcher or launcher_of(values)
    if form is None or launcher is None or values.dtype not in _DTYPES or not values.numel():
        return None
    columns, device = values.shape[-1], values.device
    lengths, dtypes = part_lengths(format, columns), part_dtypes(format)
    parts = {
        name: torch.empty(*values.shape[:-1], lengths[name], dtype=dtypes[name], device=device) for name in lengths
    }
    failed = torch.zeros((), dtype=torch.int32, device=device)
    rows, groups, values = values.numel() // columns, lengths["scales"], values.contiguous()
    outputs = (parts["codes"], parts["scales"], parts.get("mins"), failed)
    args = _QUANTIZE.pack(
        *map(_address, (values, *outputs)),
        *(rows, columns, groups, padded(format, columns) // groups // BLOCK),
        *(_DTYPES[values.dtype], _RULES[form.scale], form.bits, parts["scales"].element_size()),
    )
    launcher.launch(Program("zq_quantize"), -(-rows * groups // _WARPS), args)
    return None if failed.item() else parts


def decode_integers(
    format: Format,
    shape: Sequence[int],
    parts: Mapping[str, Tensor],
    dtype: torch.dtype,
    launcher: Launcher | None = None,
) -> Tensor | None:
    """Return the values of a quantized tensor in `dtype`, of `shape`."""
    if dtype not in _DTYPES or integers(format) is None:
        return None
    launcher = launcher or launcher_of(*parts.values())
    matrix = DeviceMatrix.of(format, shape, parts) if launcher else None
    if launcher is None or matrix is None:
        return None
    return _values(matrix, dtype, launcher).view(tuple(shape))


def _values(matrix: DeviceMatrix, dtype: torch.dtype, launcher: Launcher) -> Tensor:
    """Return (rows, columns) of `dtype`."""
    out = torch.empty(matrix.rows, matrix.columns, dtype=dtype, device=matrix.codes.device)
    if not out.numel():
        return out
    form, parts = matrix.form, -(-matrix.blocks * 4 // (32 * _WARPS))
    is_signed = form.bits == 8 and form.is_symmetric  # codes of zero are 0; as unsigned ones, 128
    args = _DEQUANTIZE.pack(
        *map(_address, (matrix.codes, matrix.scales, matrix.mins, out)),
        *(matrix.columns, matrix.blocks, matrix.each, matrix.codes.stride(0), matrix.scales.stride(0), parts),
        *(_DTYPES[dtype], form.bits, form.offset, _FLIP if is_signed else 0),
    )
    launcher.launch(Program("zq_dequantize"), matrix.rows * parts, args)
    return out


# Products -------------------------------------------------------------------------------------------------


def products(
    x: Tensor, matrices: Sequence[DeviceMatrix], biases: Sequence[Tensor | None], launcher: Launcher | None = None
) -> list[Tensor] | None:
    """Return x @ matrix.T + bias for every matrix, in the dtype of x, (tokens, columns), up to 32 tokens.

    A launch for up to 16 matrices of one number of bits, with or without minima; for several tokens one more before,
    which quantizes them.
    """
    found = launcher or launcher_of(x, *(matrix.codes for matrix in matrices), *biases)
    if found is None or x.dtype not in _DTYPES or x.shape[0] > MOST_TOKENS:
        return None
    if any(bias is not None and bias.dtype not in _DTYPES for bias in biases):
        return None
    x, held = x.contiguous(), [None if bias is None else bias.contiguous() for bias in biases]
    outs = [torch.empty(len(x), matrix.rows, dtype=x.dtype, device=x.device) for matrix in matrices]
    if not any(out.numel() for out in outs):
        return outs
    source = _input(x, found)
    kinds: dict[tuple[int, bool], list[int]] = {}
    for index, matrix in enumerate(matrices):
        if outs[index].numel():
            kinds.setdefault((matrix.form.bits, not matrix.form.is_symmetric), []).append(index)
    for (bits, has_mins), members in kinds.items():
        for first in range(0, len(members), MOST_MATRICES):
            chosen = members[first : first + MOST_MATRICES]
            rows = [(matrices[index], held[index], outs[index]) for index in chosen]
            _launch(source, rows, (("ZQ_BITS", bits), ("ZQ_MINS", int(has_mins))), found)
    return outs


@attrs.frozen
class _Input:
    """What the kernel of products reads of the activations."""

    packed: bytes  # zq_input
    tokens: int
    held: tuple[Tensor | None, ...]  # the tensors behind the addresses, until the products are launched


def _input(x: Tensor, launcher: Launcher) -> _Input:
    """Return the activations, quantized in scratch memory if they are several tokens."""
    tokens, columns = x.shape
    blocks = -(-columns // 128) * 4
    scratch = None if tokens == 1 else torch.empty(tokens * blocks * 40, dtype=torch.uint8, device=x.device)
    packed = _INPUT.pack(x.data_ptr(), _address(scratch), tokens, columns, blocks, _DTYPES[x.dtype])
    if scratch is not None:
        launcher.launch(Program("zq_activations"), -(-tokens * blocks * 4 // (32 * _WARPS)), packed)
    return _Input(packed, tokens, (x, scratch))


def _launch(
    source: _Input,
    rows: Sequence[tuple[DeviceMatrix, Tensor | None, Tensor]],
    defines: tuple[tuple[str, int], ...],
    launcher: Launcher,
) -> None:
    """Multiply matrices of one kind: (matrix, bias, output)."""
    tile = min(_TILE, 1 << (source.tokens - 1).bit_length())
    tiles, first, entries = -(-source.tokens // tile), 0, []
    for matrix, bias, out in rows:
        entries.append(_entry(matrix, bias, out, first))
        first += -(-matrix.rows // _ROWS)
    rest = bytes(_MATRIX.size * (MOST_MATRICES - len(rows)))
    args = b"".join([source.packed, _COUNTS.pack(len(rows), tiles), *entries, rest])
    launcher.launch(Program("zq_products", (("ZQ_TOKENS", tile), *defines)), first * tiles, args)


def _entry(matrix: DeviceMatrix, bias: Tensor | None, out: Tensor, first: int) -> bytes:
    """Return a row of the table: zq_matrix."""
    form = matrix.form
    is_unsigned = form.bits == 8 and not form.is_symmetric  # the kernel multiplies signed codes: these less 128
    offset = -128 if is_unsigned else form.offset if form.bits == 4 else 0
    return _MATRIX.pack(
        *map(_address, (matrix.codes, matrix.scales, matrix.mins, bias, out)),
        *(matrix.rows, matrix.blocks, matrix.each, matrix.codes.stride(0), matrix.scales.stride(0), first),
        *(0 if bias is None else _DTYPES[bias.dtype], offset, _FLIP if is_unsigned else 0),
    )


def panel_product(
    x: Tensor, matrix: DeviceMatrix, bias: Tensor | None, launcher: Launcher | None = None
) -> Tensor | None:
    """Return x @ matrix.T + bias in the dtype of x, (tokens, columns), by torch over dequantized panels of rows."""
    found = launcher or launcher_of(x, matrix.codes, bias)
    if found is None or x.dtype not in _DTYPES:
        return None
    rows = max(1, PANEL_NUMEL // max(1, matrix.columns))
    out = torch.empty(len(x), matrix.rows, dtype=x.dtype, device=x.device)
    for start in range(0, matrix.rows, rows):
        count = min(rows, matrix.rows - start)
        panel = _values(matrix.narrow(start, count), x.dtype, found)
        shift = None if bias is None else bias[start : start + count].to(x.dtype)
        out[:, start : start + count] = torch.nn.functional.linear(x, panel, shift)
    return out
