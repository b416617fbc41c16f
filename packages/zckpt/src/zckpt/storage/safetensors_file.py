"""Streaming writer for safetensors files.

The safetensors library writes files from tensors that are all in memory, and neither hashes nor syncs.  Here the
header is computed first (format/safetensors_layout.py); each tensor is then read once (from a GPU through a pinned
buffer), hashed one chunk at a time and written while the chunk is in cache.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from zckpt.format import canonical, chunks
from zckpt.format.safetensors_layout import FileLayout
from zckpt.storage.storage import Reader, Writer

_DEVICE_NBYTES = 8 << 20  # bytes copied from a GPU at once


def write(writer: Writer, layout: FileLayout, tensors: Iterable[Tensor]) -> list[str]:
    """Write and sync the file; return the checksums of each part (chunks.digests).

    `tensors`: the values of each part in order, (region.numel,) contiguous, on any device.
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
    """The same memory with stride 1: torch calls one element contiguous at any stride, but cannot view it."""
    return tensor.as_strided((tensor.numel(),), (1,))


def byte_view(tensor: Tensor) -> memoryview:
    """The memory of a contiguous 1-D CPU tensor of any dtype."""
    data: Any = tensor.view(torch.uint8).numpy()
    return memoryview(data)


def host_chunks(tensor: Tensor, stride: int = chunks.MAX_NBYTES) -> Iterator[memoryview]:
    """Yield the bytes of a 1-D contiguous tensor, `stride` at a time; each is valid until the next."""
    data = unit_stride(tensor.detach().resolve_conj().resolve_neg()).view(torch.uint8)
    for here in [data] if data.device.type == "cpu" else _copy_to_host(data):
        view = byte_view(here)
        for start in range(0, len(view), stride):
            yield view[start : start + stride]


def _copy_to_host(data: Tensor) -> Iterator[Tensor]:
    """Yield the bytes of a tensor on another device, on the CPU, through one buffer."""
    buffer = torch.empty(min(_DEVICE_NBYTES, data.numel()), dtype=torch.uint8, pin_memory=data.is_cuda)
    for start in range(0, data.numel(), _DEVICE_NBYTES):
        part = data[start : start + _DEVICE_NBYTES]
        yield buffer[: part.numel()].copy_(part)


def read_metadata(reader: Reader) -> dict[str, str]:
    """The __metadata__ of a safetensors file; {} if invalid.  For error messages only: never trusted."""
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
