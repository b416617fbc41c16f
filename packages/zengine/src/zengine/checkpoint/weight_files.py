"""Weight files written tensor by tensor: `.safetensors`, and torch.save's format (`.bin`, `.pt`).

Problem.  torch.save and safetensors need the whole state dict in memory, which a model that is trained sharded may
not fit.

Design.  Names, shapes and dtypes are known before the values, so the header is written first: JSON for safetensors,
and for torch the small pickle of a state dict (a dict of calls of `_rebuild_tensor_v2`, assembled from opcodes here).
Values follow one at a time, and each is freed after it is written.  The complete file is renamed to its name.

Rejected: torch.serialization.skip_data, which leaves holes with the checksums of zeros.
"""

from __future__ import annotations

import json
import os
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import attrs
import numpy as np
import torch
from torch import Tensor

__all__ = ["Entry", "write_weights"]

_CHUNK_NBYTES = 1 << 24  # written at once
_ALIGNMENT = 64  # of the values in torch's files, for mmap

# dtype -> (its name in safetensors, the storage class of torch's files)
_DTYPES = {
    torch.float64: ("F64", "DoubleStorage"),
    torch.float32: ("F32", "FloatStorage"),
    torch.float16: ("F16", "HalfStorage"),
    torch.bfloat16: ("BF16", "BFloat16Storage"),
    torch.int64: ("I64", "LongStorage"),
    torch.int32: ("I32", "IntStorage"),
    torch.int16: ("I16", "ShortStorage"),
    torch.int8: ("I8", "CharStorage"),
    torch.uint8: ("U8", "ByteStorage"),
    torch.bool: ("BOOL", "BoolStorage"),
}


@attrs.frozen
class Entry:
    """Tensor to write, with all its names."""

    names: tuple[str, ...]  # several for tied weights
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def write_weights(
    path: str | os.PathLike[str],
    entries: Sequence[Entry],
    values: Iterable[Tensor],
    tied: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write `path`: safetensors by that suffix, torch's format otherwise.

    values: a tensor for each entry, in order, of its shape and dtype; consumed one at a time.
    A tied weight has all its names in torch's files; safetensors has its first name, and the others in the header, as
    safetensors.torch.save_model does.
    tied: further aliases for the header of safetensors, of names that have their own values in the file.

    Raises:
        TypeError: a dtype that the format does not support; nothing is written.
    """
    for entry in entries:
        if entry.dtype not in _DTYPES:
            raise TypeError(f"{entry.names[0]} is {entry.dtype}, which {Path(path).name} cannot hold")
    final = Path(path)
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = final.with_name(f".tmp-{final.name}")
    try:
        with open(temporary, "wb") as file:
            if final.suffix == ".safetensors":
                _write_safetensors(file, entries, iter(values), tied)
            else:
                _write_torch(file, entries, iter(values))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, final)
    finally:
        temporary.unlink(missing_ok=True)


def _write_safetensors(
    file: IO[bytes], entries: Sequence[Entry], values: Iterator[Tensor], tied: Mapping[str, str]
) -> None:
    left_out = {alias: entry.names[0] for entry in entries for alias in entry.names[1:]}
    header: dict[str, object] = {"__metadata__": {**tied, **left_out, "format": "pt"}}
    offset = 0
    for entry in entries:
        place = [offset, offset + entry.nbytes]
        header[entry.names[0]] = {"dtype": _DTYPES[entry.dtype][0], "shape": list(entry.shape), "data_offsets": place}
        offset += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for entry, value in zip(entries, values, strict=True):
        _write_bytes(file.write, entry, value)


def _write_torch(file: IO[bytes], entries: Sequence[Entry], values: Iterator[Tensor]) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        _store(archive, file, "data.pkl", _pickled(entries))
        _store(archive, file, "byteorder", b"little")
        for index, (entry, value) in enumerate(zip(entries, values, strict=True)):
            with _member(archive, file, f"data/{index}") as member:
                _write_bytes(member.write, entry, value)
        _store(archive, file, "version", b"3\n")


def _store(archive: zipfile.ZipFile, file: IO[bytes], name: str, content: bytes) -> None:
    with _member(archive, file, name) as member:
        member.write(content)


def _member(archive: zipfile.ZipFile, file: IO[bytes], name: str) -> IO[bytes]:
    """Open a file of the archive whose content begins at a multiple of 64 bytes."""
    info = zipfile.ZipInfo(f"archive/{name}")
    zip64_nbytes = 20  # the extra field of force_zip64 in the local header
    begin = file.tell() + 30 + len(info.filename) + zip64_nbytes + 4
    padding = -begin % _ALIGNMENT
    info.extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding
    return archive.open(info, "w", force_zip64=True)


def _write_bytes(write: Callable[[memoryview], object], entry: Entry, value: Tensor) -> None:
    if tuple(value.shape) != entry.shape or value.dtype != entry.dtype:
        raise ValueError(
            f"expected {entry.names[0]} as {entry.dtype} {entry.shape}, got {value.dtype} {tuple(value.shape)}"
        )
    flat = value.detach().cpu().contiguous().reshape(-1)
    data: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    raw = memoryview(data)
    for start in range(0, len(raw), _CHUNK_NBYTES):
        write(raw[start : start + _CHUNK_NBYTES])


# -- data.pkl of torch's files -------------------------------------------------------------------


class _Op:
    """Pickle opcodes of a state dict; torch.load(weights_only=True) accepts all of them."""

    PROTO = b"\x80"
    GLOBAL = b"c"
    MARK = b"("
    TUPLE = b"t"
    EMPTY_TUPLE = b")"
    REDUCE = b"R"
    BINPERSID = b"Q"
    BINUNICODE = b"X"
    LONG1 = b"\x8a"
    NEWFALSE = b"\x89"
    SETITEMS = b"u"
    STOP = b"."


def _pickled(entries: Sequence[Entry]) -> bytes:
    """Return the pickle of an OrderedDict of tensors, as torch.save writes it; tied names share a storage."""
    ordered = _global("collections", "OrderedDict")
    parts = [_Op.PROTO + b"\x02", ordered, _Op.EMPTY_TUPLE, _Op.REDUCE, _Op.MARK]
    for index, entry in enumerate(entries):
        storage = _global("torch", _DTYPES[entry.dtype][1])
        address = [_text("storage"), storage, _text(str(index)), _text("cpu"), _number(entry.numel)]
        rebuilt = [
            *(_Op.MARK, *address, _Op.TUPLE, _Op.BINPERSID),
            *(_number(0), _numbers(entry.shape), _numbers(_strides(entry.shape)), _Op.NEWFALSE),
            *(ordered, _Op.EMPTY_TUPLE, _Op.REDUCE),
        ]
        call = [_global("torch._utils", "_rebuild_tensor_v2"), _Op.MARK, *rebuilt, _Op.TUPLE, _Op.REDUCE]
        for name in entry.names:
            parts += [_text(name), *call]
    return b"".join([*parts, _Op.SETITEMS, _Op.STOP])


def _global(module: str, name: str) -> bytes:
    return _Op.GLOBAL + f"{module}\n{name}\n".encode()


def _text(value: str) -> bytes:
    raw = value.encode()
    return _Op.BINUNICODE + struct.pack("<I", len(raw)) + raw


def _number(value: int) -> bytes:
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return _Op.LONG1 + bytes([len(raw)]) + raw


def _numbers(values: Sequence[int]) -> bytes:
    return _Op.MARK + b"".join(map(_number, values)) + _Op.TUPLE


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
