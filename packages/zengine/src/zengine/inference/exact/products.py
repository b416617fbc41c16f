"""Matrix products whose rows do not depend on other rows.

Problem.  A library picks kernels, and with them the order of its sums, by the shape of the whole product: a row of a
product over one token may differ in its last bits from the same row of a product over a batch.

Design.  The result of a row is defined as that of a call over a tile of 16 rows.  Larger calls are used where they
give the same bits: before the first call of a shape, a product of random matrices of that shape is compared with
calls over tiles.  So what holds is observed on the machine and not assumed of a library, and most products run as
one large call.  Rows are cut into few sizes (1024, 512, ... 16), so that few shapes are ever compared.

Products of batches of matrices (attention) are defined alike, by calls over 16 rows of one matrix each.

A sum's order does not depend on values, so random ones show it; zero weights would hide it.

Rejected: kernels of our own (a fifth of the library's speed in training); only calls over tiles of 16 rows (three
times slower in training); trust in the shapes that one CPU's library treats alike.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, final

import attrs
import torch
from torch import Tensor

__all__ = ["TILE", "NotInvariant", "Products", "pad_rows", "widened"]

TILE = 16  # rows of the call that defines a result
_SIZES = (1024, 512, 256, 128, 64, 32, TILE)  # rows of a call
_SHIFT = 5  # rows by which a tile is rolled, to see that a row's place in it does not matter


class NotInvariant(RuntimeError):
    """A row of a product depends on its place in a tile of 16 rows, so no call of this library can be exact."""


def pad_rows(x: Tensor, multiple: int = TILE) -> Tensor:
    """Append zeros to the first dim, up to a multiple."""
    missing = -x.shape[0] % multiple
    return torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing else x


def widened(x: Tensor, dim: int = -1) -> Tensor:
    """Append zeros to a dim of fewer than 16: libraries have odd kernels for such products.  Sums do not change."""
    missing = TILE - x.shape[dim]
    if missing <= 0:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat((x, x.new_zeros(shape)), dim)


@final
@attrs.define(eq=False)
class Products:
    """Products, and the shapes that have been compared with tiles."""

    compared: dict[Hashable, bool] = attrs.field(factory=dict)  # shape, strides, dtype, device -> equal to tiles

    def of_rows(self, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x @ matrix + bias, (rows, out).

        x: (rows, in), contiguous, rows a multiple of 16; matrix: (in, out); bias: (out,).
        """
        width = matrix.shape[1]
        if min(matrix.shape) < TILE:
            x, matrix = widened(x), widened(widened(matrix), 0)
            bias = None if bias is None else widened(bias)
        out = x.new_empty(x.shape[0], matrix.shape[1])
        for rows in self._cuts(x.shape[0], matrix, bias is not None):
            if bias is None:
                torch.mm(x[rows], matrix, out=out[rows])
            else:
                torch.addmm(bias, x[rows], matrix, out=out[rows])
        return out[:, :width]

    def _cuts(self, num_rows: int, matrix: Tensor, with_bias: bool) -> Iterator[slice]:
        """Yield the rows of each call, the largest calls first."""
        start = 0
        for size in _SIZES:
            if num_rows - start >= size and (size == TILE or self._rows_are_equal(size, matrix, with_bias)):
                while num_rows - start >= size:
                    yield slice(start, start + size)
                    start += size

    def _rows_are_equal(self, size: int, matrix: Tensor, with_bias: bool) -> bool:
        """Compare a call over `size` rows with calls over tiles, once for each kind of matrix."""
        key = ("rows", size, with_bias, *_kind(matrix))
        if key not in self.compared:
            draw = _Draw(matrix)
            other, x = draw.like(matrix), draw(size, matrix.shape[0])
            bias = draw(matrix.shape[1]) if with_bias else None

            def call(rows: Tensor) -> Tensor:
                return rows @ other if bias is None else torch.addmm(bias, rows, other)

            self.compared[key] = _is_tiled(call, x)
        return self.compared[key]

    def of_batches(self, x: Tensor, y: Tensor, added_to: Tensor | None = None) -> Tensor:
        """Return x @ y, (n, rows, out), or add it to `added_to` in place.

        x: (n, rows, in), rows a multiple of 16; y: (n, in, out), both at least 16.
        """
        if self._batches_are_equal(x, y, added_to is not None):
            return torch.bmm(x, y) if added_to is None else added_to.baddbmm_(x, y)
        out = x.new_empty(x.shape[0], x.shape[1], y.shape[2]) if added_to is None else added_to
        for index in range(x.shape[0]):
            for start in range(0, x.shape[1], TILE):
                rows, one = slice(start, start + TILE), slice(index, index + 1)
                if added_to is None:
                    out[one, rows] = torch.bmm(x[one, rows], y[one])
                else:
                    out[one, rows] = torch.baddbmm(out[one, rows], x[one, rows], y[one])
        return out

    def _batches_are_equal(self, x: Tensor, y: Tensor, is_added: bool) -> bool:
        key = ("batches", is_added, *_kind(x), *_kind(y))
        if key not in self.compared:
            draw = _Draw(x)
            one, other, base = draw.like(x), draw.like(y), draw(x.shape[0], x.shape[1], y.shape[2])

            def call(n: slice, x: Tensor) -> Tensor:
                given = x[None] if x.dim() == 2 else x
                return torch.baddbmm(base[n, : given.shape[1]], given, other[n]) if is_added else given @ other[n]

            whole = call(slice(None), one)
            self.compared[key] = all(
                torch.equal(whole[index, :TILE], call(slice(index, index + 1), one[index, :TILE])[0])
                for index in {0, x.shape[0] // 2, x.shape[0] - 1}
            ) and _is_tiled(lambda rows: (rows[None] @ other[-1:])[0], one[-1])
        return self.compared[key]


def _is_tiled(call: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Return whether a call over all rows gives what calls over the first, a middle and the last tile give.

    Raises NotInvariant if a row's place in a tile matters.
    """
    whole = call(x)
    for start in sorted({0, x.shape[0] // 2 // TILE * TILE, x.shape[0] - TILE}):
        rows = slice(start, start + TILE)
        tile = call(x[rows])
        if not torch.equal(call(x[rows].roll(_SHIFT, 0)), tile.roll(_SHIFT, 0)):
            raise NotInvariant(
                f"a row of a product of {TILE} rows, {tuple(x.shape[1:])} {x.dtype} on {x.device}, depends on its "
                "place among them: rollout.exact is not possible with this library of products"
            )
        if not torch.equal(whole[rows], tile):
            return False
    return True


def _kind(x: Tensor) -> tuple[Any, ...]:
    """Return what a library may choose kernels by."""
    return (*x.shape, *x.stride(), x.dtype, x.device, torch.get_num_threads())


@final
class _Draw:
    """Random tensors of one dtype and device, without effect on torch's generators."""

    def __init__(self, like: Tensor) -> None:
        self.example, self.generator = like, torch.Generator(like.device).manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        return self.fill(self.example.new_empty(shape))

    def like(self, x: Tensor) -> Tensor:
        """Return a tensor of the same shape and strides."""
        return self.fill(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device))

    def fill(self, x: Tensor) -> Tensor:
        return x.normal_(generator=self.generator)
