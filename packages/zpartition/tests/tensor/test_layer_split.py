"""The split of one module under one style."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zpartition.tensor.layer_split import linear_kind, split_layer
from zpartition.tensor.styles import Column, Row, Vocabulary


class Conv1D(nn.Module):
    """Conv1D as in Transformers: the weight is (in, out)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.randn(nf))


def test_a_linear_subclass_is_not_split() -> None:
    assert linear_kind(nn.Linear(2, 2)) is not None
    assert linear_kind(Conv1D(2, 2)) is not None
    assert linear_kind(nn.MultiheadAttention(2, 1).out_proj) is None
    with pytest.raises(ValueError, match=r"NonDynamicallyQuantizableLinear.*no subclasses"):
        split_layer("out", nn.MultiheadAttention(2, 1).out_proj, Row(units=2), 2, 0)


def test_a_transposed_weight_is_split_along_the_other_dim() -> None:
    column = split_layer("c", Conv1D(8, 6), Column(units=4), 2, 1)
    assert column.addresses["weight"].boxes == (((0, 6), (4, 8)),)
    assert column.addresses["bias"].boxes == (((4, 8),),)
    row = split_layer("r", Conv1D(8, 6), Row(units=3), 2, 0)
    assert row.addresses["weight"].boxes == (((0, 4), (0, 8)),)
    assert row.addresses["bias"].num_copies == 2
    with pytest.raises(ValueError, match=r"c is a Conv1D.*Column\(gathers=True\)"):
        split_layer("c", Conv1D(9, 6), Column(units=3, blocks=(3, 3, 3)), 2, 0)


def test_embeddings_with_unsupported_options_raise() -> None:
    with pytest.raises(ValueError, match=r"max_norm=1.0, sparse=True"):
        split_layer("e", nn.Embedding(4, 2, max_norm=1.0, sparse=True), Vocabulary(), 2, 0)
    with pytest.raises(ValueError, match="gathered outputs need no blocks"):
        split_layer("q", nn.Linear(2, 6), Column(units=2, blocks=(2, 2, 2), gathers=True), 2, 0)
