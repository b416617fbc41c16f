"""Safetensors: dtype names, and the layout of a file, computed before a byte is written.

Any safetensors reader opens the result.  A tensor that is stored whole keeps its name and shape; a part is named
after its region.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping, Sequence

import attrs
import torch

from zckpt.errors import CheckpointInputError
from zckpt.format import canonical
from zckpt.format.regions import Region, box_numel, whole_box

_MAX_HEADER_NBYTES = 100_000_000  # limit of the safetensors library

_NAMES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors name.  Raises CheckpointInputError for a dtype that the format does not support."""
    if dtype not in _NAMES:
        allowed = ", ".join(str(each).removeprefix("torch.") for each in _NAMES)
        raise CheckpointInputError(f"dtype {dtype} cannot be stored in safetensors; allowed: {allowed}")
    return _NAMES[dtype]


def dtype_of(name: str) -> torch.dtype | None:
    """The torch dtype of a safetensors name; None if unknown."""
    return _DTYPES.get(name)


@attrs.frozen
class TensorPart:
    """One tensor of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the global tensor
    region: Region
    nbytes: int = attrs.field(init=False)

    @nbytes.default
    def _nbytes(self) -> int:
        return self.region.numel * self.dtype.itemsize

    @property
    def key(self) -> str:
        return self.name + _key_suffix(self.shape, self.region)


@functools.lru_cache(maxsize=1 << 14)  # models have many tensors and few shapes
def _shape_text(region: Region) -> str:
    """Shape of the box if the span covers it, else flat; as JSON."""
    sizes = [hi - lo for lo, hi in region.box] if region.numel == box_numel(region.box) else [region.numel]
    return canonical.dump(sizes).decode()


@functools.lru_cache(maxsize=1 << 14)
def _key_suffix(shape: tuple[int, ...], region: Region) -> str:
    box = whole_box(shape)
    return "" if region == Region(box, (0, box_numel(box))) else f"@{region}"


@attrs.frozen
class FileLayout:
    """A file before it is written; keys[i] and offsets[i] belong to parts[i]."""

    parts: tuple[TensorPart, ...]
    keys: tuple[str, ...]
    offsets: tuple[int, ...]  # from the start of the file
    header: bytes  # length field, JSON, spaces up to a multiple of 8
    nbytes: int


def place_parts(parts: Sequence[TensorPart], metadata: Mapping[str, str]) -> FileLayout:
    """Compute header, keys and offsets.  Parts in order of decreasing itemsize are each aligned to their itemsize."""
    keys = _unique([part.key for part in parts])
    entries = {"__metadata__": canonical.dump(dict(metadata)).decode()}  # as text: there may be very many
    starts, end = [], 0
    for key, part in zip(keys, parts):
        starts.append(end)
        end += part.nbytes
        shape = _shape_text(part.region)
        entries[key] = f'{{"data_offsets":[{starts[-1]},{end}],"dtype":"{dtype_name(part.dtype)}","shape":{shape}}}'
    text = ("{" + ",".join(f"{canonical.quote(key)}:{entries[key]}" for key in sorted(entries)) + "}").encode()
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
    """Unique keys: "~" is appended to a key that collides with the name of another tensor."""
    taken: set[str] = set()
    for i, key in enumerate(keys):
        while keys[i] in taken:
            keys[i] = keys[i] + "~"
        taken.add(keys[i])
        assert keys[i].startswith(key)
    return keys
