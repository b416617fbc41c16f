"""Streaming writer for safetensors files.

The safetensors library writes files from tensors that are all in memory, and neither hashes nor syncs.  Here the
header is computed first (format/safetensors_layout.py); each tensor is then read once (from a GPU through a pinned
buffer), hashed one chunk at a time and written while the chunk is in cache.  Small neighbours are joined first.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from zckpt.format import canonical, chunks
from zckpt.format.safetensors_layout import FileLayout, TensorPart
from zckpt.storage.storage import Reader, Writer

_DEVICE_NBYTES = 8 << 20  # bytes copied from a GPU at once
_STEP_NBYTES = 256 << 10  # hashed, then copied, at once: fits a core's cache
_SMALL_NBYTES = 16 << 10  # largest part that is joined with its neighbours
_JOINABLE = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32})


def write(writer: Writer, layout: FileLayout, tensors: Iterable[Tensor]) -> list[str]:
    """Write and sync the file; return the checksums of each part (chunks.digests).

    `tensors`: the values of each part in order, (region.numel,) contiguous, on any device.
    """
    writer.write(memoryview(layout.header))
    digests: list[str] = []
    for group in _groups(zip(layout.parts, tensors, strict=True)):
        digests += _write_small(writer, group) if len(group) > 1 else [_write_one(writer, *group[0])]
    writer.sync()
    return digests


def _groups(given: Iterable[tuple[TensorPart, Tensor]]) -> Iterator[list[tuple[TensorPart, Tensor]]]:
    """Small neighbours of one dtype and device together, at most one chunk of bytes; each other part alone."""
    group: list[tuple[TensorPart, Tensor]] = []
    nbytes = 0
    for part, tensor in given:
        assert (tensor.dtype, tensor.numel()) == (part.dtype, part.region.numel), part
        if group and not (_may_join(group[-1], (part, tensor)) and nbytes + part.nbytes <= chunks.MAX_NBYTES):
            yield group
            group, nbytes = [], 0
        group.append((part, tensor))
        nbytes += part.nbytes
    if group:
        yield group


def _may_join(before: tuple[TensorPart, Tensor], here: tuple[TensorPart, Tensor]) -> bool:
    """True if two neighbours are small, and of one dtype and device."""
    (part, tensor), (other, found) = before, here
    is_alike = (part.dtype, tensor.device) == (other.dtype, found.device) and part.dtype in _JOINABLE
    return is_alike and max(part.nbytes, other.nbytes) <= _SMALL_NBYTES


def _write_small(writer: Writer, group: list[tuple[TensorPart, Tensor]]) -> list[str]:
    """Write several parts by one call, as tens of thousands of calls cost more than the bytes."""
    (data,) = host_chunks(torch.cat([tensor for _, tensor in group]))
    digests, start = [], 0
    for part, _ in group:
        stop = start + part.nbytes
        digests.append(chunks.digests(data[start:stop], chunks.chunk_nbytes(stop - start)))
        start = stop
    writer.write(data)
    return digests


def _write_one(writer: Writer, part: TensorPart, tensor: Tensor) -> str:
    hasher = chunks.Hasher(chunks.chunk_nbytes(part.nbytes))
    for data in host_chunks(tensor, _STEP_NBYTES):
        hasher.update(data)
        writer.write(data)
    return hasher.digests()


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
