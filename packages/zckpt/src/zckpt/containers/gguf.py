"""GGUF files (versions 2 and 3): metadata, and tensors as raw bytes by name.

    with read_gguf("model.gguf") as file:
        file.metadata["general.architecture"], file.tensors["blk.0.attn_q.weight"].type_name
        codes = file.read("blk.0.attn_q.weight")  # (nbytes,) uint8, mapped

The layout is that of ggml's specification (docs/gguf.md): magic, counts, keys with typed values, tensor infos, and
after padding the data.  This module knows how many bytes a block of each type has, so that it can check ranges; the
meaning of the bytes is the caller's.

Nothing that the file says is trusted.  Counts are bounded by the bytes that are left, so a forged one costs no
memory; arrays of numbers become numpy arrays of their own size; ranges must lie within the file and may not overlap.

Rejected: the `gguf` package, which trusts counts and offsets and loads arrays as one object per element.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, final

import attrs
import numpy as np
import torch
from torch import Tensor

from zckpt.containers.mapping import UNMAPPED, map_file
from zckpt.errors import CheckpointCorrupt, CheckpointInputError, CheckpointMismatch

__all__ = ["BlockType", "GGUFFile", "GGUFTensor", "read_gguf"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4
_MAX_DEPTH = 4  # of arrays in arrays
_MAX_NAME_NBYTES = 1 << 16
_ALIGNMENT = 32  # of data, if the metadata does not say otherwise

_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}


@attrs.frozen
class BlockType:
    """A tensor type: every `numel` neighbours of a row take `nbytes`."""

    name: str
    numel: int
    nbytes: int


# By ggml's number.  Numbers that are missing here were withdrawn, or are younger than this table.
_TYPES = {
    number: BlockType(name, numel, nbytes)
    for number, name, numel, nbytes in (
        *((0, "F32", 1, 4), (1, "F16", 1, 2), (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22)),
        *((7, "Q5_1", 32, 24), (8, "Q8_0", 32, 34), (10, "Q2_K", 256, 84)),
        *((11, "Q3_K", 256, 110), (12, "Q4_K", 256, 144), (13, "Q5_K", 256, 176), (14, "Q6_K", 256, 210)),
        *((15, "Q8_K", 256, 292), (16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74), (18, "IQ3_XXS", 256, 98)),
        *((19, "IQ1_S", 256, 50), (20, "IQ4_NL", 32, 18), (21, "IQ3_S", 256, 110), (22, "IQ2_S", 256, 82)),
        *((23, "IQ4_XS", 256, 136), (24, "I8", 1, 1), (25, "I16", 1, 2), (26, "I32", 1, 4), (27, "I64", 1, 8)),
        *((28, "F64", 1, 8), (29, "IQ1_M", 256, 56), (30, "BF16", 1, 2), (34, "TQ1_0", 256, 54)),
        *((35, "TQ2_0", 256, 66), (39, "MXFP4", 32, 17), (40, "NVFP4", 64, 36), (41, "Q1_0", 128, 18)),
    )
}


@attrs.frozen
class GGUFTensor:
    """One tensor of a file.  Invariant: its bytes lie within the file and overlap no other's."""

    name: str
    type: BlockType
    shape: tuple[int, ...]  # torch's order: rows first, the blocks lie along the last dim
    start: int  # offset of its first byte in the file
    nbytes: int

    @property
    def type_name(self) -> str:
        """ggml's name of the type, such as "Q4_K"."""
        return self.type.name


@final
@attrs.define(eq=False)
class GGUFFile:
    """An open file.  Its tensors keep the mapping alive after `close`."""

    path: Path
    metadata: Mapping[str, Any]  # str, int, float, bool, list of str, or a numpy array of numbers
    tensors: Mapping[str, GGUFTensor]  # in the order of the file
    mapping: mmap.mmap  # private: a write to it never reaches the file

    def read(self, name: str) -> Tensor:
        """Return the bytes of a tensor, (nbytes,) uint8: a view of the file.

        Raises CheckpointMismatch if the file has no tensor of this name.
        """
        if name not in self.tensors:
            some = ", ".join(itertools.islice(self.tensors, 5))
            raise CheckpointMismatch(f"{self.path} has no tensor {name!r}; it has {len(self.tensors)}: {some}, ...")
        found = self.tensors[name]
        if not found.nbytes:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self.mapping, dtype=torch.uint8, count=found.nbytes, offset=found.start)

    def close(self) -> None:
        """Release the mapping; it is unmapped with the last tensor."""
        self.mapping, self.tensors = UNMAPPED, {}

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Open a file and check all that it says of itself; tensors are read when asked for.

    Raises CheckpointReadError (the operating system), CheckpointInputError (not GGUF, an unknown version or type, big
    endian), CheckpointCorrupt (truncated, forged or inconsistent).
    """
    path = Path(path)
    mapping = map_file(path)
    reader = _Reader(path, mapping)
    num_tensors, num_keys = reader.head()
    metadata = reader.metadata(num_keys)
    infos = [reader.tensor_info() for _ in reader.counted(num_tensors, least_nbytes=24, of="tensors")]
    return GGUFFile(path, metadata, _place(reader, infos, metadata), mapping)


@attrs.frozen
class _Info:
    """A tensor as its info describes it."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    offset: int  # from the start of the data


@final
@attrs.define
class _Reader:
    """Reads values in order.  Every read checks that the file has the bytes."""

    path: Path
    data: mmap.mmap
    at: int = 0  # offset of the next byte

    def corrupt(self, problem: str) -> CheckpointCorrupt:
        return CheckpointCorrupt(f"{self.path}: {problem}", path=str(self.path))

    def take(self, nbytes: int) -> bytes:
        """Return the next bytes."""
        if nbytes > len(self.data) - self.at:
            raise self.corrupt(
                f"byte {self.at:,}: {nbytes:,} more are announced, {len(self.data) - self.at:,} are left"
            )
        self.at += nbytes
        return self.data[self.at - nbytes : self.at]

    def number(self, kind: int) -> Any:
        """Return one number of a GGUF type."""
        dtype = _NUMBERS[kind]
        return np.frombuffer(self.take(np.dtype(dtype).itemsize), dtype=dtype)[0].item()

    def u32(self) -> int:
        return int(self.number(4))

    def u64(self) -> int:
        return int(self.number(10))

    def text(self, most_nbytes: int | None = None) -> str:
        nbytes, at = self.u64(), self.at
        if most_nbytes is not None and nbytes > most_nbytes:
            raise self.corrupt(f"byte {at:,}: a name of {nbytes:,} bytes; at most {most_nbytes:,} are allowed")
        try:
            return self.take(nbytes).decode()
        except UnicodeDecodeError:
            if most_nbytes is None:  # vocabularies may hold pieces of characters
                return self.data[at : at + nbytes].decode(errors="surrogateescape")
            raise self.corrupt(f"byte {at:,}: a name that is not UTF-8") from None

    def counted(self, count: int, least_nbytes: int, of: str) -> range:
        """Return range(count) if the file has room for so many."""
        if count * least_nbytes > len(self.data) - self.at:
            raise self.corrupt(f"byte {self.at:,}: {count:,} {of} are announced, more than the file has room for")
        return range(count)

    def head(self) -> tuple[int, int]:
        """Return the numbers of tensors and of keys."""
        if self.data[:4] != _MAGIC:
            raise CheckpointInputError(f"{self.path} is no GGUF file: it begins with {self.data[:4]!r}")
        self.at = 4
        (version,) = struct.unpack("<I", self.take(4))
        if version not in _VERSIONS:
            why = "it is big-endian" if version and not version & 0xFFFF else f"version {version}"
            raise CheckpointInputError(f"{self.path}: {why}; versions 2 and 3, little-endian, are read")
        return self.u64(), self.u64()

    def metadata(self, count: int) -> dict[str, Any]:
        """Return the values by key."""
        found: dict[str, Any] = {}
        for _ in self.counted(count, least_nbytes=13, of="keys"):
            key = self.text(_MAX_NAME_NBYTES)
            if key in found:
                raise self.corrupt(f"the key {key[:80]!r} occurs twice")
            found[key] = self.value(self.u32())
        return found

    def value(self, kind: int, depth: int = 0) -> Any:
        """Return a value of a GGUF type."""
        if kind in _NUMBERS:
            return self.number(kind)
        if kind == _BOOL:
            return self.take(1) != b"\0"
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY or depth == _MAX_DEPTH:
            raise self.corrupt(f"byte {self.at:,}: a value of type {kind}, depth {depth}")
        element, count = self.u32(), self.u64()
        if element in _NUMBERS or element == _BOOL:
            dtype = np.dtype(_NUMBERS.get(element, "?"))
            return np.frombuffer(self.take(count * dtype.itemsize), dtype=dtype)
        least = 8 if element == _STRING else 12
        return [self.value(element, depth + 1) for _ in self.counted(count, least, of="elements")]

    def tensor_info(self) -> _Info:
        """Return the next tensor's info."""
        name, num_dims = self.text(_MAX_NAME_NBYTES), self.u32()
        if num_dims > _MAX_DIMS:
            raise self.corrupt(f"{name[:80]!r} has {num_dims:,} dims; at most {_MAX_DIMS} are allowed")
        shape = tuple(self.u64() for _ in range(num_dims))[::-1]
        number, offset = self.u32(), self.u64()
        if number not in _TYPES:
            known = ", ".join(each.name for each in _TYPES.values())
            raise CheckpointInputError(f"{self.path}: {name[:80]!r} has the unknown type {number}; known: {known}")
        return _Info(name, _TYPES[number], shape, offset)


def _place(reader: _Reader, infos: list[_Info], metadata: Mapping[str, Any]) -> dict[str, GGUFTensor]:
    """Return the tensors with their ranges in the file, which are checked."""
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
        raise reader.corrupt(f"general.alignment is {alignment!r}, not a power of two up to {1 << 20:,}")
    begin = -(-reader.at // alignment) * alignment
    found: dict[str, GGUFTensor] = {}
    for info in infos:
        row = info.shape[-1] if info.shape else 1
        if row % info.type.numel:
            raise reader.corrupt(
                f"{info.name[:80]!r} has rows of {row:,}, no multiple of the {info.type.numel} of {info.type.name}"
            )
        nbytes = math.prod(info.shape) // info.type.numel * info.type.nbytes
        start = begin + info.offset
        if info.offset % alignment:
            raise reader.corrupt(f"{info.name[:80]!r} begins at {info.offset:,}, no multiple of {alignment}")
        if start + nbytes > len(reader.data):
            raise reader.corrupt(
                f"{info.name[:80]!r} ends at byte {start + nbytes:,} of {len(reader.data):,}: truncated"
            )
        if info.name in found:
            raise reader.corrupt(f"the tensor {info.name[:80]!r} occurs twice")
        found[info.name] = GGUFTensor(info.name, info.type, info.shape, start, nbytes)
    ordered = sorted((each for each in found.values() if each.nbytes), key=lambda each: each.start)
    for one, other in itertools.pairwise(ordered):
        if one.start + one.nbytes > other.start:
            raise reader.corrupt(f"the tensors {one.name[:80]!r} and {other.name[:80]!r} overlap")
    return found
