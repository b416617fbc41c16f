"""Grouped products against one product for each expert."""

from __future__ import annotations

import torch

from zpartition.experts.mlp import grouped_linear, runs


def test_products_and_gradients_equal_those_of_each_expert() -> None:
    torch.manual_seed(0)
    counts = [3, 0, 5, 0]
    x, weight, bias = (torch.randn(s, dtype=torch.float64) for s in ((8, 4), (4, 6, 4), (4, 6)))
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    expected = torch.cat([x[rows] @ weight[e].t() + bias[e] for e, rows in runs(counts)])
    probe = torch.randn(8, 6, dtype=torch.float64)
    wanted = torch.autograd.grad((expected * probe).sum(), leaves)
    y = grouped_linear(x, weight, counts, bias)
    torch.testing.assert_close(y, expected)
    for found, other in zip(torch.autograd.grad((y * probe).sum(), leaves), wanted):
        torch.testing.assert_close(found, other)


def test_zero_rows_give_zero_gradients_not_missing_ones() -> None:
    x, weight = torch.zeros(0, 4, requires_grad=True), torch.randn(3, 6, 4, requires_grad=True)
    grouped_linear(x, weight, [0, 0, 0]).sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()
    assert x.grad is not None


def test_autocast_computes_in_its_dtype() -> None:
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(2, 8, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = grouped_linear(x, weight, [1, 3])
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32


def test_runs_skip_experts_without_rows() -> None:
    assert list(runs([2, 0, 1])) == [(0, slice(0, 2)), (2, slice(2, 3))]
