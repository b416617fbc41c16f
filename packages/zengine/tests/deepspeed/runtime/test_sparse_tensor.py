"""A sparse gradient as rows: sums, sizes, and conversion."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zengine.deepspeed.runtime.sparse_tensor import SparseTensor


def test_sums_of_rows_are_those_of_dense_tensors() -> None:
    a, b = torch.zeros(6, 3), torch.zeros(6, 3)
    a[[1, 4]], b[[0, 4]] = 1.0, 2.0
    sparse, other = SparseTensor(a.to_sparse(1)), SparseTensor(b.to_sparse(1))
    assert torch.equal(sparse.to_coo_tensor().to_dense(), a)
    assert sparse.sparse_size() == (2 + 6, 18)
    sparse.add(other)
    assert torch.equal(sparse.to_coo_tensor().to_dense(), a + b)
    sparse.add(sparse)
    assert torch.equal(sparse.to_coo_tensor().to_dense(), 2 * (a + b))
    assert "dense_size=[6, 3]" in str(sparse)
    assert SparseTensor.type() == "deepspeed.SparseTensor"
    empty = SparseTensor()
    empty.indices, empty.values, empty.dense_size = other.indices, other.values, [6, 3]
    assert torch.equal(empty.to_coo_tensor().to_dense(), b)


def test_the_gradient_of_an_embedding_is_taken() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([3, 3, 1])).sum().backward()
    found = SparseTensor(table.weight.grad)
    assert found.indices.tolist() == [1, 3]
    assert found.values.tolist() == [[1, 1], [2, 2]]


def test_wrong_tensors_are_rejected() -> None:
    with pytest.raises(TypeError, match=r"tensor\.to_sparse\(1\)"):
        SparseTensor(torch.zeros(3, 3))
    with pytest.raises(ValueError, match="is empty: pass a tensor"):
        SparseTensor().to_coo_tensor()
    small = SparseTensor(torch.ones(2, 2).to_sparse(1))
    with pytest.raises(ValueError, match=r"size \[2, 2\] cannot be added to one of size \[3, 2\]"):
        SparseTensor(torch.ones(3, 2).to_sparse(1)).add(small)
