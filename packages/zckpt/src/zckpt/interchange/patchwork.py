"""A lazy tensor composed of parts of file tensors, for files whose layout differs from the module's.

    both = torch.cat([torch.stack(gates), torch.stack(ups)], dim=1)    # gates, ups: lists of `Patchwork.over(slice)`
    both[0:2, 5:9, :]                                                  # reads two experts' rows of the files

Problem.  Some folders keep each expert of a layer in its own tensor where the module has one tensor for all; others
keep query, key and value in one.  Converting a whole layer would pass it through the memory of every rank, although a
rank needs a small part.

Design.  A shape and a list of patches.  Each patch is a box of a source placed somewhere in the whole, and maps
dimensions of the source to dimensions of the whole.  Stack, cat, split and transpose map patches to patches, so any
chain of them is again a list of patches, and reading a box reads the patches that it intersects.  These operations
are torch's own functions (`__torch_function__`), so conversions written for tensors run on it unchanged.  Arithmetic
and reshaping raise TypeError, so nothing is read by mistake.

Rejected: a tree of operations (each read walks it; the list has no depth); meta tensors whose strides encode the
source (a stack copies, so strides cannot); our own names for the operations of other libraries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, final

import attrs
import torch
from torch import Tensor

__all__ = ["Patchwork"]

Shape = tuple[int, ...]


class TensorSource(Protocol):
    """A tensor in a file, read by boxes."""

    def get_shape(self) -> Sequence[int]: ...
    def __getitem__(self, box: Any) -> Tensor: ...


@final
@attrs.frozen(eq=False)
class Patch:
    """A box of a source, and its position in the whole."""

    at: Shape  # first index in the whole
    shape: Shape  # size in the whole
    source: TensorSource | Tensor
    start: Shape  # first index in the source
    dims: tuple[int | None, ...]  # source dim of each dim of the whole; None: a dim of size 1 without one

    def read(self, box: Sequence[tuple[int, int]]) -> Tensor:
        """Read a box, (start, stop) per dim of the whole, inside the patch.  Returns a view if the source does."""
        sides = [(start, start + 1) for start in self.start]
        for (lo, hi), at, dim in zip(box, self.at, self.dims):
            if dim is not None:
                sides[dim] = (self.start[dim] + lo - at, self.start[dim] + hi - at)
        found: Tensor = self.source[tuple(slice(*side) for side in sides) or ...]
        kept = [dim for dim in self.dims if dim is not None]
        order = [*kept, *(dim for dim in range(len(sides)) if dim not in kept)]
        return found.permute(order).reshape([hi - lo for lo, hi in box])


@final
@attrs.frozen(eq=False)
class Patchwork:
    """A lazy tensor of patches.  Invariant: patches do not overlap, and cover `shape`."""

    shape: torch.Size
    patches: tuple[Patch, ...]

    @classmethod
    def over(cls, source: TensorSource | Tensor) -> Patchwork:
        """The whole of one source."""
        shape = torch.Size(source.shape if isinstance(source, Tensor) else source.get_shape())
        start = (0,) * len(shape)
        return cls(shape, (Patch(start, shape, source, start, tuple(range(len(shape)))),))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def __getitem__(self, box: Any) -> Tensor:
        """Read the values of a box.

        box: one slice, or a tuple of slices, of step 1; `...` and missing dims are whole.  Returns a tensor of the
            sources' dtype (the promoted dtype if they differ).

        Raises TypeError for any other index.
        """
        wanted = self._sides(box if isinstance(box, tuple) else (box,))
        parts = []
        for patch in self.patches:
            ends = (at + size for at, size in zip(patch.at, patch.shape))
            common = [(max(lo, at), min(hi, end)) for (lo, hi), at, end in zip(wanted, patch.at, ends)]
            if all(lo < hi for lo, hi in common):
                parts.append((common, patch.read(common)))
        if len(parts) == 1 and parts[0][0] == wanted:
            return parts[0][1]
        dtypes = [part.dtype for _, part in parts] or [torch.get_default_dtype()]
        whole = torch.empty([hi - lo for lo, hi in wanted], dtype=functools.reduce(torch.promote_types, dtypes))
        for common, part in parts:
            at = tuple(slice(lo - first, hi - first) for (lo, hi), (first, _) in zip(common, wanted))
            whole[at].copy_(part)
        return whole

    def _sides(self, box: tuple[Any, ...]) -> list[tuple[int, int]]:
        """(start, stop) per dimension."""
        named = [side for side in box if side is not ...]
        is_box = all(isinstance(side, slice) and side.step in (None, 1) for side in named)
        if not is_box or len(named) > self.ndim or len(box) - len(named) > 1:
            raise TypeError(
                f"{box} is not a box of shape {tuple(self.shape)}: pass slices of step 1, and at most one ..."
            )
        first = next((at for at, side in enumerate(box) if side is ...), len(box))
        whole = [slice(None)] * (self.ndim - len(named))
        sides = [side.indices(size) for side, size in zip([*named[:first], *whole, *named[first:]], self.shape)]
        return [(start, max(start, stop)) for start, stop, _ in sides]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Apply a function of torch without reading.  Raises TypeError for functions that compute values."""
        if function not in _FUNCTIONS:
            name = getattr(function, "__name__", str(function))
            known = ", ".join(sorted(each.__name__ for each in _FUNCTIONS))
            raise TypeError(
                f"torch.{name} is not supported on a Patchwork, which is not read yet; supported: {known}"
            )
        return _FUNCTIONS[function](*args, **dict(kwargs or {}))

    # Methods of tensors, for conversions that use them.

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> Patchwork:
        return self

    def transpose(self, dim0: int, dim1: int) -> Patchwork:
        return _transpose(self, dim0, dim1)

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Patchwork, ...]:
        return _chunk(self, chunks, dim)

    def split(self, split_size_or_sections: int | Sequence[int], dim: int = 0) -> tuple[Patchwork, ...]:
        return _split(self, split_size_or_sections, dim)

    def unbind(self, dim: int = 0) -> tuple[Patchwork, ...]:
        return _unbind(self, dim)

    def squeeze(self, dim: int) -> Patchwork:
        return _squeeze(self, dim)

    def unsqueeze(self, dim: int) -> Patchwork:
        return _unsqueeze(self, dim)


def _patchwork(shape: Iterable[int], patches: Iterable[Patch]) -> Patchwork:
    return Patchwork(torch.Size(shape), tuple(patches))


def _replace_item(items: Shape, dim: int, item: int) -> Shape:
    return (*items[:dim], item, *items[dim + 1 :])


def _normalize_dim(dim: int, ndim: int) -> int:
    """Resolve a negative dim.  Raises IndexError."""
    if not -ndim <= dim < ndim:
        raise IndexError(f"dim {dim} is out of range for {ndim} dims")
    return dim % ndim


def _cat(tensors: Sequence[Patchwork], dim: int = 0) -> Patchwork:
    first = tensors[0].shape
    dim = _normalize_dim(dim, len(first))
    if any(_replace_item(each.shape, dim, 0) != _replace_item(first, dim, 0) for each in tensors):
        raise ValueError(f"shapes {[tuple(each.shape) for each in tensors]} cannot be concatenated along dim {dim}")
    patches, end = [], 0
    for each in tensors:
        patches += [
            attrs.evolve(patch, at=_replace_item(patch.at, dim, patch.at[dim] + end)) for patch in each.patches
        ]
        end += each.shape[dim]
    return _patchwork(_replace_item(first, dim, end), patches)


def _stack(tensors: Sequence[Patchwork], dim: int = 0) -> Patchwork:
    return _cat([_unsqueeze(each, dim) for each in tensors], _normalize_dim(dim, tensors[0].ndim + 1))


def _narrow(input: Patchwork, dim: int, start: int, length: int) -> Patchwork:
    dim = _normalize_dim(dim, input.ndim)
    size = input.shape[dim]
    start += size if start < 0 else 0
    if not 0 <= start <= start + length <= size:
        raise ValueError(
            f"start {start} and length {length} exceed dim {dim} of size {size} (shape {tuple(input.shape)})"
        )
    patches = []
    for patch in input.patches:
        first = max(start, patch.at[dim])
        last = min(start + length, patch.at[dim] + patch.shape[dim])
        if first < last:
            begin, along = patch.start, patch.dims[dim]
            if along is not None:
                begin = _replace_item(begin, along, begin[along] + first - patch.at[dim])
            at, shape = _replace_item(patch.at, dim, first - start), _replace_item(patch.shape, dim, last - first)
            patches.append(attrs.evolve(patch, at=at, shape=shape, start=begin))
    return _patchwork(_replace_item(input.shape, dim, length), patches)


def _split(tensor: Patchwork, split_size_or_sections: int | Sequence[int], dim: int = 0) -> tuple[Patchwork, ...]:
    size, given = tensor.shape[dim], split_size_or_sections
    sizes = [min(given, size - at) for at in range(0, size, given)] if isinstance(given, int) else list(given)
    if sum(sizes) != size:
        raise ValueError(f"sizes {sizes} do not sum to {size}, the size of dim {dim} (shape {tuple(tensor.shape)})")
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return tuple(_narrow(tensor, dim, start, length) for start, length in zip(starts, sizes))


def _chunk(input: Patchwork, chunks: int, dim: int = 0) -> tuple[Patchwork, ...]:
    return _split(input, max(1, -(-input.shape[dim] // chunks)), dim)


def _unbind(input: Patchwork, dim: int = 0) -> tuple[Patchwork, ...]:
    return tuple(_squeeze(each, dim) for each in _split(input, 1, dim))


def _transpose(input: Patchwork, dim0: int, dim1: int) -> Patchwork:
    order = list(range(input.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]

    def swap(items: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(items[dim] for dim in order)

    return _patchwork(
        swap(input.shape),
        (
            attrs.evolve(each, at=swap(each.at), shape=swap(each.shape), dims=swap(each.dims))
            for each in input.patches
        ),
    )


def _unsqueeze(input: Patchwork, dim: int) -> Patchwork:
    dim = _normalize_dim(dim, input.ndim + 1)

    def insert(items: Sequence[Any], item: Any) -> tuple[Any, ...]:
        return (*items[:dim], item, *items[dim:])

    return _patchwork(
        insert(input.shape, 1),
        (
            attrs.evolve(each, at=insert(each.at, 0), shape=insert(each.shape, 1), dims=insert(each.dims, None))
            for each in input.patches
        ),
    )


def _squeeze(input: Patchwork, dim: int) -> Patchwork:
    dim = _normalize_dim(dim, input.ndim)
    if input.shape[dim] != 1:
        return input

    def drop(items: Sequence[Any]) -> tuple[Any, ...]:
        return (*items[:dim], *items[dim + 1 :])

    return _patchwork(
        drop(input.shape),
        (
            attrs.evolve(each, at=drop(each.at), shape=drop(each.shape), dims=drop(each.dims))
            for each in input.patches
        ),
    )


# Parameters have torch's names.
_FUNCTIONS: Mapping[Any, Callable[..., Any]] = {
    torch.cat: _cat,
    torch.stack: _stack,
    torch.narrow: _narrow,
    torch.split: _split,
    torch.chunk: _chunk,
    torch.unbind: _unbind,
    torch.transpose: _transpose,
    torch.unsqueeze: _unsqueeze,
    torch.squeeze: _squeeze,
}
