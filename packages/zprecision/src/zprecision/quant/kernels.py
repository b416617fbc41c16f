"""Calls of the C kernels of quantization: arguments as addresses, results as tensors.

Each function returns None where the kernels cannot serve: no extension, no plain CPU tensor, another dtype or format.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zprecision.backends.native import Library, is_addressable, library, num_threads
from zprecision.quant.formats import Format, Integers, integers
from zprecision.quant.layout import padded, part_dtypes, part_lengths

__all__ = [
    *("MOST_DENSE_TOKENS", "Matrix", "dense_products", "describe", "empty_panels", "encode_integers", "pack_panels"),
    "products",
]

MOST_DENSE_TOKENS = 16  # beyond, torch's matrix product reads plain weights faster
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_RULES = {"search": 0, "amax": 1, "minmax": 2, "ggml": 3}

Matrix = tuple[Tensor, int, Integers | None]  # its data, its rows, and its format, None for plain rows


def encode_integers(values: Tensor, format: Format) -> dict[str, Tensor] | None:
    """Return the parts of `values`, (..., K), in an integer format; None also if they are not finite."""
    form, found = integers(format), library()
    if form is None or found is None or not is_addressable(values) or values.dtype not in _DTYPES:
        return None
    rows, columns = values.numel() // max(1, values.shape[-1]), values.shape[-1]
    lengths, dtypes = part_lengths(format, columns), part_dtypes(format)
    leading = values.shape[:-1]
    parts = {name: torch.empty(*leading, lengths[name], dtype=dtypes[name], device="cpu") for name in lengths}
    if not rows or not columns:
        return None
    values = values.contiguous()
    job = found.ffi.new("zq_quantization *")
    job.values, job.codes = _void(found, values), found.ffi.cast("uint8_t *", parts["codes"].data_ptr())
    job.scales = _void(found, parts["scales"])
    job.mins = _void(found, parts["mins"]) if "mins" in parts else found.ffi.NULL
    job.rows, job.columns, job.group = rows, columns, form.group or padded(format, columns)
    job.dtype, job.rule, job.bits = _DTYPES[values.dtype], _RULES[form.scale], form.bits
    job.scale_bytes = parts["scales"].element_size()
    return parts if found.lib.zq_quantize(job, num_threads()) else None


def empty_panels(num_bytes: int, device: torch.device) -> Tensor:
    """Return memory for panels, (num_bytes,) uint8, in large pages where the system has them: they read faster."""
    data = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    found = library()
    if found is not None and is_addressable(data):
        found.lib.zq_use_large_pages(_void(found, data), num_bytes)
    return data


def pack_panels(codes: Tensor, scales: Tensor, mins: Tensor | None, form: Integers, panels: Tensor) -> bool:
    """Write the panels of a matrix into `panels`, uint8; False where the kernels cannot serve."""
    found = library()
    if found is None or not is_addressable(codes):
        return False
    codes, scales = codes.contiguous(), scales.contiguous()
    lows = scales if mins is None else mins.contiguous()
    length = codes.shape[-1] * 8 // form.bits
    matrix = found.ffi.new("zq_matrix *")
    describe(matrix, codes.shape[0], form, length)
    addresses = [_bytes(found, part) for part in (codes, scales, lows, panels)]
    found.lib.zq_pack(*addresses, matrix, length // 32, codes.dtype == torch.int8, num_threads())
    return True


def products(x: Tensor, matrices: Sequence[Matrix], biases: Sequence[Tensor | None]) -> list[Tensor] | None:
    """Return x @ matrix.T + bias, float32, for every packed matrix, in one call."""
    found = library()
    if found is None or not is_addressable(x):
        return None
    tokens, columns = x.shape
    rows = x.float().contiguous()
    outs, held, table = _table(found, tokens, columns, matrices, biases)
    num_parts = max((entry.num_parts for entry in table), default=1)
    num_bytes = found.lib.zq_scratch_bytes(tokens, columns, num_parts)
    scratch = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    at = found.ffi.cast("float *", rows.data_ptr())
    found.lib.zq_products(at, tokens, columns, table, len(matrices), _void(found, scratch), num_threads())
    del held
    return outs


def dense_products(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor] | None:
    """Return x @ weight.T + bias, float32, for plain weights of one dtype, float32 or bfloat16, up to 16 tokens."""
    found, dtype = library(), weights[0].dtype
    usable = all(w.dtype == dtype and is_addressable(w) and w.is_contiguous() for w in weights)
    if (
        found is None
        or not usable
        or not is_addressable(x)
        or _DTYPES.get(dtype, 2) == 2
        or x.shape[0] > MOST_DENSE_TOKENS
    ):
        return None
    tokens, columns = x.shape
    rows = x.float().contiguous()
    outs, held, table = _table(found, tokens, columns, [(w, w.shape[0], None) for w in weights], biases)
    scratch = torch.empty(found.lib.zq_scratch_bytes(tokens, columns, 1), dtype=torch.uint8, device="cpu")
    at, into = found.ffi.cast("float *", rows.data_ptr()), _void(found, scratch)
    found.lib.zq_dense_products(at, tokens, columns, table, len(weights), _DTYPES[dtype], into, num_threads())
    del held
    return outs


def _table(
    found: Library, tokens: int, columns: int, matrices: Sequence[Matrix], biases: Sequence[Tensor | None]
) -> tuple[list[Tensor], list[Tensor], Any]:
    """Return the outputs, what C's table points to besides, and the table."""
    table = found.ffi.new("zq_matrix[]", len(matrices))
    outs, held = [], []
    for entry, (data, rows, form), bias in zip(table, matrices, biases, strict=True):
        out = torch.empty(tokens, rows, dtype=torch.float32, device="cpu")
        entry.data, entry.out = _bytes(found, data), found.ffi.cast("float *", out.data_ptr())
        if bias is not None:
            held.append(bias.detach().float().contiguous())
            entry.bias = found.ffi.cast("float *", held[-1].data_ptr())
        describe(entry, rows, form, -(-columns // 32) * 32)
        outs.append(out)
    return outs, held, table


def describe(entry: Any, rows: int, form: Integers | None, length: int) -> None:
    """Fill the rows and the format of a zq_matrix; None stands for plain rows.  length: of a row, in whole blocks."""
    entry.rows = rows
    if form is not None:
        entry.group = form.group or length
        entry.bits, entry.offset = form.bits, form.offset
        entry.scale_bytes, entry.has_mins = 2 if form.group else 4, not form.is_symmetric
        entry.num_parts = form.activation_bits // 8


def _void(found: Library, tensor: Tensor) -> Any:
    return found.ffi.cast("void *", tensor.data_ptr())


def _bytes(found: Library, tensor: Tensor) -> Any:
    return found.ffi.cast("uint8_t *", tensor.data_ptr())
