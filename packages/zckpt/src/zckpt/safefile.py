"""Writing a safetensors file as a stream.

The safetensors library writes a file from tensors that all lie in memory, and can neither hash nor sync.  Here the
header is computed first, then each tensor passes once: read from the tensor (from a GPU through a pinned buffer),
hashed a megabyte at a time, written while that is in the cache.  Any safetensors reader opens the result; a tensor
that is whole keeps its name and shape, a part of one is named after its region.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from . import canonical, chunks
from .dtypes import dtype_name
from .errors import CheckpointInputError
from .regions import Region, box_numel, whole_box
from .storage import Reader, Writer

_DEVICE_NBYTES = 8 << 20  # what comes from a GPU at once
_MAX_HEADER_NBYTES = 100_000_000  # what the safetensors library accepts


@attrs.frozen
class Part:
    """One tensor-to-be of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the global tensor
    region: Region

    @property
    def nbytes(self) -> int:
        return self.region.numel * self.dtype.itemsize

    @property
    def file_shape(self) -> tuple[int, ...]:
        """The box's own shape if the span is all of it, else flat."""
        if self.region.numel == box_numel(self.region.box):
            return tuple(hi - lo for lo, hi in self.region.box)
        return (self.region.numel,)

    @property
    def key(self) -> str:
        is_whole = self.region == Region(whole_box(self.shape), (0, box_numel(whole_box(self.shape))))
        return self.name if is_whole else f"{self.name}@{self.region}"


@attrs.frozen
class FileLayout:
    """A file before it is written; keys[i] and offsets[i] belong to parts[i]."""

    parts: tuple[Part, ...]
    keys: tuple[str, ...]
    offsets: tuple[int, ...]  # from the start of the file
    header: bytes  # length field, JSON, spaces up to a multiple of 8
    nbytes: int


def lay_out(parts: Sequence[Part], metadata: Mapping[str, str]) -> FileLayout:
    """Pure.  Give the parts by falling itemsize and each one will lie at a multiple of its itemsize."""
    keys = _unique([part.key for part in parts])
    table: dict[str, object] = {"__metadata__": dict(metadata)}
    starts, end = [], 0
    for key, part in zip(keys, parts):
        table[key] = {
            "dtype": dtype_name(part.dtype),
            "shape": list(part.file_shape),
            "data_offsets": [end, end + part.nbytes],
        }
        starts.append(end)
        end += part.nbytes
    text = canonical.dump(table)
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER_NBYTES:
        raise CheckpointInputError(f"{len(parts):,} tensors in one file need a header of {len(text):,} bytes")
    header = struct.pack("<Q", len(text)) + text
    return FileLayout(
        parts=tuple(parts),
        keys=tuple(keys),
        offsets=tuple(len(header) + start for start in starts),
        header=header,
        nbytes=len(header) + end,
    )


def _unique(keys: list[str]) -> list[str]:
    """A tensor may by chance bear the name that we give to a part of another; tell them apart."""
    taken: set[str] = set()
    for i, key in enumerate(keys):
        while keys[i] in taken:
            keys[i] = keys[i] + "~"
        taken.add(keys[i])
        assert keys[i].startswith(key)
    return keys


def write(writer: Writer, layout: FileLayout, tensors: Iterable[Tensor]) -> list[str]:
    """Write and sync the file; returns the checksums of each part (chunks.digests).

    `tensors`: for each part in order its values, (region.numel,) contiguous, on any device.
    """
    writer.write(memoryview(layout.header))
    digests = []
    for part, tensor in zip(layout.parts, tensors, strict=True):
        assert (tensor.dtype, tensor.numel()) == (part.dtype, part.region.numel), part
        chunk = chunks.chunk_nbytes(part.nbytes)
        found = []
        for data in host_chunks(tensor):
            found.append(chunks.digests(data, chunk))
            writer.write(data)
        digests.append("".join(found))
    writer.sync()
    return digests


def unit_stride(tensor: Tensor) -> Tensor:
    """The same memory with stride 1: torch calls one element contiguous at any stride, and then cannot view it."""
    return tensor.as_strided((tensor.numel(),), (1,))


def byte_view(tensor: Tensor) -> memoryview:
    """The memory of a contiguous 1-D CPU tensor of any dtype."""
    data: Any = tensor.view(torch.uint8).numpy()
    return memoryview(data)


def host_chunks(tensor: Tensor, stride: int = chunks.MAX_NBYTES) -> Iterator[memoryview]:
    """The bytes of a 1-D contiguous tensor, `stride` at a time; each is valid until the next is asked for."""
    data = unit_stride(tensor.detach().resolve_conj().resolve_neg()).view(torch.uint8)
    for here in [data] if data.device.type == "cpu" else _brought(data):
        view = byte_view(here)
        for start in range(0, len(view), stride):
            yield view[start : start + stride]


def _brought(data: Tensor) -> Iterator[Tensor]:
    """Bytes of another device, on the CPU, through one buffer."""
    buffer = torch.empty(min(_DEVICE_NBYTES, data.numel()), dtype=torch.uint8, pin_memory=data.is_cuda)
    for start in range(0, data.numel(), _DEVICE_NBYTES):
        part = data[start : start + _DEVICE_NBYTES]
        yield buffer[: part.numel()].copy_(part)


def read_metadata(reader: Reader) -> dict[str, str]:
    """The __metadata__ of a safetensors file, {} if it makes no sense.  Only for error messages: never trusted."""
    try:
        field = bytearray(8)
        reader.read_into(0, memoryview(field))
        (nbytes,) = struct.unpack("<Q", field)
        if nbytes > min(reader.nbytes - 8, 1 << 24):
            return {}
        text = bytearray(nbytes)
        reader.read_into(8, memoryview(text))
        metadata = canonical.load(bytes(text))["__metadata__"]
        return {str(key): str(value)[:80] for key, value in metadata.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
