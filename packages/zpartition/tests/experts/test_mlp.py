"""The usual expert, alone and in stacks."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from zpartition.experts.mlp import ExpertMLP


def test_one_expert_is_two_or_three_layers() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8)
    gated, plain = ExpertMLP(8, 12, "swiglu"), ExpertMLP(8, 12, "gelu", bias=True)
    assert gated.gate is not None
    torch.testing.assert_close(gated(x), gated.down(F.silu(gated.gate(x)) * gated.up(x)))
    torch.testing.assert_close(plain(x), plain.down(F.gelu(plain.up(x))))


def test_split_dims_are_the_inner_ones() -> None:
    expert = ExpertMLP(8, 12, "geglu", bias=True)
    shapes = {name: tuple(param.shape) for name, param in expert.named_parameters()}
    assert all(shapes[name][dim] == 12 for name, dim in expert.split_dims().items())
    assert set(shapes) - set(expert.split_dims()) == {"down.bias"}


def test_an_unknown_activation_raises() -> None:
    with pytest.raises(ValueError, match="one of gelu, relu, silu, swiglu, geglu, got 'tanh'"):
        ExpertMLP(8, 12, "tanh")
