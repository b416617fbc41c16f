"""Files in torch.save's format, written without pickling: plain containers, numbers, strings and tensors.

The pickle is assembled from opcodes here.  A `Record` (unpickler.py) is written as an object of its class, which only
the reader's library has; a file without records loads with torch.load(weights_only=True).
"""

from __future__ import annotations

import os
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, final

import attrs
import torch
from torch import Tensor

from zckpt.containers.unpickler import Record

_ALIGNMENT = 64  # of the values, for mmap
_STORAGES = {
    torch.float64: "DoubleStorage",
    torch.float32: "FloatStorage",
    torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage",
    torch.int64: "LongStorage",
    torch.int32: "IntStorage",
    torch.int16: "ShortStorage",
    torch.int8: "CharStorage",
    torch.uint8: "ByteStorage",
    torch.bool: "BoolStorage",
}


def write_torch_file(path: str | os.PathLike[str], value: Any) -> None:
    """Write `value`, flushed to disk: dict, list, tuple, str, int, float, bool, None, torch.dtype, Tensor, Record.

    A tensor is written contiguous, in a storage of its own.  Raises TypeError for other types, OSError.
    """
    program = _Program()
    program.write(value)
    with open(path, "wb") as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            _store(archive, file, "data.pkl", [b"\x80\x02" + bytes(program.code) + b"."])
            _store(archive, file, "byteorder", [b"little"])
            for index, tensor in enumerate(program.tensors):
                _store(archive, file, f"data/{index}", _bytes_of(tensor))
            _store(archive, file, "version", [b"3\n"])
        file.flush()
        os.fsync(file.fileno())


def _store(archive: zipfile.ZipFile, file: IO[bytes], name: str, content: Any) -> None:
    """Write a file of the archive, whose content begins at a multiple of 64 bytes."""
    info = zipfile.ZipInfo(f"archive/{name}")
    zip64_nbytes = 20  # the extra field of force_zip64 in the local header
    begin = file.tell() + 30 + len(info.filename) + zip64_nbytes + 4
    padding = -begin % _ALIGNMENT
    info.extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding
    with archive.open(info, "w", force_zip64=True) as member:
        for chunk in content:
            member.write(chunk)


def _bytes_of(tensor: Tensor) -> Iterator[memoryview]:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    raw = memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")  # type: ignore[arg-type]
    for start in range(0, len(raw), 1 << 24):
        yield raw[start : start + (1 << 24)]


@final
@attrs.define(eq=False)
class _Program:
    """A pickle of protocol 2 in the making, and the tensors that it refers to."""

    code: bytearray = attrs.field(factory=bytearray)
    tensors: list[Tensor] = attrs.field(factory=list)

    def write(self, value: Any) -> None:
        for kind, write in _WRITERS.items():
            if isinstance(value, kind):
                write(self, value)
                return
        if value is not None:
            raise TypeError(f"a {type(value).__name__} has no plain form in torch's files: {str(value)[:80]!r}")
        self.code += b"N"

    def name(self, module: str, name: str) -> None:
        self.code += f"c{module}\n{name}\n".encode()

    def boolean(self, value: bool) -> None:
        self.code += b"\x88" if value else b"\x89"

    def integer(self, value: int) -> None:
        raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        self.code += b"\x8a" + bytes([len(raw)]) + raw

    def real(self, value: float) -> None:
        self.code += b"G" + struct.pack(">d", value)

    def text(self, value: str) -> None:
        raw = value.encode()
        self.code += b"X" + struct.pack("<I", len(raw)) + raw

    def sequence(self, value: Any) -> None:
        self.code += b"]"
        self._items(value, b"e")

    def tuple(self, value: Any) -> None:
        self._items(value, b"t")

    def mapping(self, value: Mapping[Any, Any]) -> None:
        self.code += b"}"
        self._items((each for pair in value.items() for each in pair), b"u")

    def _items(self, values: Any, end: bytes) -> None:
        self.code += b"("
        for each in values:
            self.write(each)
        self.code += end

    def dtype(self, value: torch.dtype) -> None:
        self.name("torch", str(value).removeprefix("torch."))

    def record(self, value: Record) -> None:
        module, _, name = value.kind.rpartition(".")
        self.name(module, name)
        self.tuple(value.args)
        self.code += b"\x81"  # the class's __new__
        self.write(value.state)
        self.code += b"b"

    def tensor(self, value: Tensor) -> None:
        if value.dtype not in _STORAGES:
            raise TypeError(f"torch's files cannot hold {value.dtype} here")
        self.name("torch._utils", "_rebuild_tensor_v2")
        self.code += b"(("
        self.text("storage")
        self.name("torch", _STORAGES[value.dtype])
        self.text(str(len(self.tensors)))
        self.text("cpu")
        self.integer(value.numel())
        self.code += b"tQ"
        shape = tuple(value.shape)
        for part in (0, shape, torch.empty(shape, device="meta").stride(), False):
            self.write(part)
        self.name("collections", "OrderedDict")
        self.code += b")RtR"
        self.tensors.append(value)


_WRITERS: Mapping[type, Callable[[_Program, Any], None]] = {
    bool: _Program.boolean,
    int: _Program.integer,
    float: _Program.real,
    str: _Program.text,
    tuple: _Program.tuple,
    list: _Program.sequence,
    dict: _Program.mapping,
    torch.dtype: _Program.dtype,
    Record: _Program.record,
    Tensor: _Program.tensor,
}
