"""Comparison of two checkpoints, independent of their sharding and world sizes.

Tensors are compared by name.  Two tensors of equal sharding are compared by their checksums, without reading; the
others are read side by side, a chunk at a time, so memory is two chunks.  Equal means equal bits: a NaN equals
itself, and 0.0 does not equal -0.0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import final

import attrs
import torch
from torch import Tensor

from zckpt.format.canonical import JSON
from zckpt.format.manifest import TensorEntry
from zckpt.format.regions import whole_box
from zckpt.format.shard import Shard, describe
from zckpt.loading.checkpoint import Checkpoint

_CHUNK_NBYTES = 16 << 20
_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@attrs.frozen
class Difference:
    """A tensor of equal shape and dtype in both checkpoints, with different values."""

    name: str
    numel: int
    different_numel: int  # elements whose bits differ
    max_abs: float  # of the difference, in float64; NaN if a side is NaN where the bits differ


@final
@attrs.frozen
class Comparison:
    """Two checkpoints side by side."""

    only_a: tuple[str, ...]  # names
    only_b: tuple[str, ...]
    retyped: tuple[str, ...]  # lines: name, dtype and shape on both sides
    different: tuple[Difference, ...]
    equal: tuple[str, ...]  # names of tensors of equal bits
    objects: tuple[str, ...]  # lines: path, and the values on both sides

    def is_same(self, tolerance: float = 0.0) -> bool:
        """True if nothing differs except values by at most `tolerance`; 0.0 requires equal bits."""
        rest = (self.only_a, self.only_b, self.retyped, self.objects)
        return not any(rest) and all(0 < tolerance >= each.max_abs for each in self.different)


def compare(
    a: Checkpoint,
    b: Checkpoint,
    *,
    by_checksum: bool = True,
    on_progress: Callable[[int], None] = lambda nbytes: None,
) -> Comparison:
    """Compare all tensors and the objects of the run; tag, step and library versions do not count.

    by_checksum: trust equal checksums of equal sharding; otherwise read everything.
    on_progress: called with the bytes of each compared tensor (of `a`).
    """
    left, right = a.manifest.tensors, b.manifest.tensors
    both = sorted(left.keys() & right.keys())
    fitting = [name for name in both if _kind(left[name]) == _kind(right[name])]
    different, equal = [], []
    for name in fitting:
        if (by_checksum and _fingerprint(left[name]) == _fingerprint(right[name])) or not (
            found := _difference(a, b, name, left[name])
        ):
            equal.append(name)
        else:
            different.append(found)
        on_progress(math.prod(left[name].shape) * left[name].dtype.itemsize)
    return Comparison(
        only_a=tuple(sorted(left.keys() - right.keys())),
        only_b=tuple(sorted(right.keys() - left.keys())),
        retyped=tuple(
            f"{name}: {describe(*_kind(left[name]))} -> {describe(*_kind(right[name]))}"
            for name in both
            if name not in set(fitting)
        ),
        different=tuple(different),
        equal=tuple(equal),
        objects=tuple(_json_differences(a.objects, b.objects, "")),
    )


def _kind(entry: TensorEntry) -> tuple[torch.dtype, tuple[int, ...]]:
    return entry.dtype, entry.shape


def _fingerprint(entry: TensorEntry) -> list[tuple[object, ...]]:
    return [(piece.region, piece.chunk_nbytes, piece.checksum) for piece in entry.pieces]


def _difference(a: Checkpoint, b: Checkpoint, name: str, entry: TensorEntry) -> Difference | None:
    count, largest = 0, 0.0
    for left, right in zip(_chunks(a, name, entry), _chunks(b, name, entry)):
        plain = _SAME_SIZE[entry.dtype.itemsize]
        other = left.view(plain) != right.view(plain)
        if not bool(other.any()):
            continue
        gaps = (_wide(left[other]) - _wide(right[other])).abs()
        if not (entry.dtype.is_floating_point or entry.dtype.is_complex):
            gaps = gaps.clamp(min=1.0)  # float64 does not distinguish large neighbouring integers
        count += int(other.sum())
        largest = float(torch.cat([gaps, torch.tensor([largest], dtype=gaps.dtype)]).max())  # max of NaN is NaN
    return Difference(name, math.prod(entry.shape), count, largest) if count else None


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.complex128 if values.is_complex() else torch.float64)


def _chunks(checkpoint: Checkpoint, name: str, entry: TensorEntry) -> Iterator[Tensor]:
    """Yield a tensor's elements in order, (n,) each; a chunk is valid until the next."""
    numel, step = math.prod(entry.shape), max(1, _CHUNK_NBYTES // entry.dtype.itemsize)
    buffer = torch.empty(min(numel, step), dtype=entry.dtype)
    for start in range(0, numel, step):
        stop = min(start + step, numel)
        here = buffer[: stop - start]
        checkpoint.read([Shard(name, entry.shape, whole_box(entry.shape), (start, stop), here)], strict=False)
        yield here


def _json_differences(a: JSON, b: JSON, path: str) -> Iterator[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys()):
            where = f"{path}.{key}" if path else key
            if key not in b:
                yield f"{where}: only in A"
            elif key not in a:
                yield f"{where}: only in B"
            else:
                yield from _json_differences(a[key], b[key], where)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (left, right) in enumerate(zip(a, b)):
            yield from _json_differences(left, right, f"{path}[{i}]")
    elif type(a) is not type(b) or a != b:
        yield f"{path}: {_short(a)} -> {_short(b)}"


def _short(value: JSON) -> str:
    if isinstance(value, (dict, list)):
        return f"{'object' if isinstance(value, dict) else 'array'} of {len(value)}"
    return f"{value!r:.60}"
