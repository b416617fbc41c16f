"""Tensors in files, read when asked for: the common face of all sources.

A plain tensor has `get_shape()` and is read by boxes, `[start:stop, ...]`, as zpartition and Transformers'
conversions do.  `QuantizedSlice` is one whose file holds codes: read by boxes it gives float32 values, and
`exact_codes` returns the codes themselves, if a format of zprecision represents them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, final

import attrs
import torch
from torch import Tensor

from zprecision.quant import GroupedCodes, QuantizedTensor

__all__ = ["Box", "QuantizedSlice", "StackedSlice", "StoredTensor", "Tensors", "exact_codes", "sides_of"]


class StoredTensor(Protocol):
    """A tensor in a file."""

    def get_shape(self) -> list[int]: ...
    def __getitem__(self, box: Any) -> Tensor: ...


Tensors = Mapping[str, StoredTensor]


@final
@attrs.frozen(eq=False)
class QuantizedSlice:
    """A matrix that its file holds as codes."""

    name: str  # in the file, for errors
    shape: tuple[int, ...]
    read: Callable[[], QuantizedTensor | GroupedCodes]  # all of it; raises ValueError for damaged parts
    rows: Tensor | None = None  # (shape[0],) int64: the file's row of each row; None: the same

    def get_shape(self) -> list[int]:
        """Return the shape, as slices of safetensors do."""
        return list(self.shape)

    def __getitem__(self, box: Any) -> Tensor:
        """Return the values of a box, float32."""
        (start, stop), *others = sides_of(box, self.shape)
        values = self._stored().narrow(0, start, stop - start).dequantize(torch.float32)
        return values[(slice(None), *(slice(*side) for side in others))]

    def codes(self) -> QuantizedTensor | None:
        """Return the codes with all that belongs to them; None if no format represents them exactly."""
        found = self._stored()
        return found if isinstance(found, QuantizedTensor) else found.to_quantized()

    def with_rows(self, rows: Tensor) -> QuantizedSlice:
        """Return it with its rows in another order."""
        return attrs.evolve(self, rows=rows)

    def _stored(self) -> QuantizedTensor | GroupedCodes:
        try:
            found = self.read()
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from error
        for part in found.parts().values():
            if part.is_floating_point() and not bool(part.float().isfinite().all()):
                raise ValueError(f"{self.name}: its scales have infinite or NaN values; the file is damaged")
        rows = self.rows
        return found if rows is None else found.map(lambda part: part[rows])


@final
@attrs.frozen(eq=False)
class StackedSlice:
    """One matrix of stacked experts in a file."""

    stack: StoredTensor
    index: int

    def get_shape(self) -> list[int]:
        """Return the shape of the matrix."""
        return self.stack.get_shape()[1:]

    def __getitem__(self, box: Any) -> Tensor:
        """Return the values of a box; others of the stack are not read."""
        own = (slice(self.index, self.index + 1), *(slice(*side) for side in sides_of(box, self.get_shape())))
        return self.stack[own][0]


@final
@attrs.frozen(eq=False)
class Box:
    """A part of a tensor in a file."""

    stored: StoredTensor
    sides: tuple[tuple[int, int], ...]  # (start, stop) for each dim

    def get_shape(self) -> list[int]:
        """Return the shape of the part."""
        return [stop - start for start, stop in self.sides]

    def __getitem__(self, box: Any) -> Tensor:
        """Return the values of a box of the part; others are not read."""
        own = zip(self.sides, sides_of(box, self.get_shape()))
        return self.stored[tuple(slice(start + lo, start + hi) for (start, _), (lo, hi) in own)]


def exact_codes(stored: StoredTensor) -> QuantizedTensor | None:
    """Return the codes of a quantized tensor in a file; None for plain ones and codes without a format here."""
    return stored.codes() if isinstance(stored, QuantizedSlice) else None


def sides_of(box: Any, shape: Sequence[int]) -> list[tuple[int, int]]:
    """Return (start, stop) for each dim of `shape`; box: a slice of step 1, or a tuple of them; `...` is whole."""
    given = [side for side in (box if isinstance(box, tuple) else (box,)) if side is not ...]
    if len(given) > len(shape) or not all(isinstance(side, slice) and side.step in (None, 1) for side in given):
        raise TypeError(f"{box} is not a box of shape {tuple(shape)}: pass slices of step 1")
    filled = itertools.chain(given, itertools.repeat(slice(None)))
    return [side.indices(size)[:2] for side, size in zip(filled, shape)]
