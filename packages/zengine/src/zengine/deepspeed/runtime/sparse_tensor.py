"""`deepspeed.runtime.sparse_tensor`: a sparse gradient as row indices and row values."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

__all__ = ["SparseTensor"]


@final
class SparseTensor:
    """Rows of a matrix, some of them several times; equal rows are summed when the tensor becomes dense."""

    indices: Tensor | None  # (rows,) int64
    values: Tensor | None  # (rows, width)
    dense_size: list[int] | None

    def __init__(self, dense_tensor: Tensor | None = None) -> None:
        """Take a tensor of torch's sparse COO layout with one sparse dimension, such as an embedding's gradient.

        Without a tensor the attributes are None and the caller sets them.  Raises TypeError for a dense tensor.
        """
        self.orig_dense_tensor = dense_tensor
        self.indices = self.values = self.dense_size = None
        if dense_tensor is None:
            return
        if not dense_tensor.is_sparse or dense_tensor.sparse_dim() != 1:
            raise TypeError(
                f"SparseTensor takes a tensor of layout torch.sparse_coo with one sparse dimension, got "
                f"{dense_tensor.layout}. Convert a dense one with tensor.to_sparse(1)."
            )
        self.is_sparse, self.dtype = True, dense_tensor.dtype
        merged = dense_tensor.coalesce()
        self.indices, self.values = merged.indices().flatten(), merged.values()
        self.dense_size = list(merged.size())

    @staticmethod
    def type() -> str:
        """Return DeepSpeed's name of the type."""
        return "deepspeed.SparseTensor"

    def to_coo_tensor(self) -> Tensor:
        """Return torch's sparse tensor.  Raises ValueError if the attributes are not set."""
        indices, values, size = self._rows()
        return torch.sparse_coo_tensor(indices.unsqueeze(0), values, size)

    def sparse_size(self) -> tuple[int, int]:
        """Return (numbers stored, elements of the dense tensor)."""
        indices, values, size = self._rows()
        return indices.numel() + values.numel(), torch.Size(size).numel()

    def add(self, b: SparseTensor) -> None:
        """Add `b` in place by appending its rows.  Raises ValueError for another dense size."""
        indices, values, size = self._rows()
        other_indices, other_values, other_size = b._rows()
        if size != other_size:
            raise ValueError(f"a sparse tensor of size {other_size} cannot be added to one of size {size}.")
        self.indices, self.values = torch.cat([indices, other_indices]), torch.cat([values, other_values])

    def _rows(self) -> tuple[Tensor, Tensor, list[int]]:
        if self.indices is None or self.values is None or self.dense_size is None:
            raise ValueError("this SparseTensor is empty: pass a tensor, or set indices, values and dense_size.")
        return self.indices, self.values, self.dense_size

    def __str__(self) -> str:
        indices, values, size = self._rows()
        stored, dense = self.sparse_size()
        return (
            f"DeepSpeed.SparseTensor(indices_size={indices.size()}, values_size={values.size()}, dense_size={size}, "
            f"device={indices.get_device()}, reduction_factor={dense / stored})"
        )

    __repr__ = __str__
