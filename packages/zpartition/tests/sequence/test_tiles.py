"""Tiles change only the saved memory; gradients of weights arrive once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from zpartition.sequence import tiled, tiled_loss


def make() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 4)).double()
    return model, torch.randn(2, 10, 4, dtype=torch.float64, requires_grad=True)


def counting(model: nn.Module) -> list[str]:
    """Records each gradient that a parameter gets."""
    arrived: list[str] = []
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    return arrived


@pytest.mark.parametrize("num_tiles", [1, 3, 5, 99])
def test_a_tiled_mlp_equals_the_mlp(num_tiles: int) -> None:
    model, x = make()
    model.eval()
    expected = model(x)
    upstream = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, [x, *model.parameters()], upstream)
    arrived = counting(model)
    out = torch.cat(tiled(model, [x], num_tiles), 1)
    out.backward(upstream)
    grads = [x.grad, *(param.grad for param in model.parameters())]
    assert float((out - expected).detach().abs().max()) < 1e-14
    assert max(float((a - b).abs().max()) for a, b in zip(grads, wanted)) < 1e-14
    assert sorted(arrived) == sorted(name for name, _ in model.named_parameters())


def test_backward_repeats_the_dropout_masks_and_saves_no_wide_tensor() -> None:
    model, x = make()
    kept: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor.shape[-1])
        return tensor

    ones = torch.nn.Sequential(nn.Dropout(0.5))
    flat = torch.ones(1, 64, 1, dtype=torch.float64, requires_grad=True)
    out = torch.cat(tiled(ones, [flat], 4), 1)
    out.sum().backward()
    assert torch.equal(out, flat.grad)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        tiled(model, [x], 5)
    assert 16 not in kept
    with torch.no_grad():
        assert not tiled(model, [x], 2)[0].requires_grad


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_tiled_loss_is_differentiated_in_forward(reduction: Any) -> None:
    model, x = make()
    model.eval()
    labels = torch.arange(20) % 4
    unused = nn.Parameter(torch.ones(()))

    def loss_of(hidden: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(model(hidden), labels, reduction="sum") + 0 * unused.detach()

    flat = x.flatten(0, 1)
    expected = loss_of(flat, labels) / (4 if reduction == "mean" else 1)
    wanted = torch.autograd.grad(expected * 2, [x, *model.parameters()])
    arrived = counting(model)
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    loss = tiled_loss(loss_of, [x.flatten(0, 1), labels], 4, reduction=reduction)
    assert len(calls) == 4
    assert not arrived
    (loss * 2).backward()
    assert len(calls) == 4
    assert sorted(arrived) == sorted(name for name, _ in model.named_parameters())
    grads = [x.grad, *(param.grad for param in model.parameters())]
    assert float((loss - expected).detach().abs()) < 1e-12
    assert max(float((a - b).abs().max()) for a, b in zip(grads, wanted)) < 1e-12
    with torch.no_grad():
        assert float((tiled_loss(loss_of, [flat, labels], 4, reduction=reduction) - expected).abs()) < 1e-12


def test_mistakes_raise_with_the_numbers() -> None:
    model, x = make()
    with pytest.raises(ValueError, match=r"2 tiles of tensors of lengths \[10, 9\]"):
        tiled(model, [x, x[:, :9]], 2)
    with pytest.raises(ValueError, match="0 tiles"):
        tiled(model, [x], 0)
    with pytest.raises(ValueError, match=r"returned shape \[1, 10, 4\]"):
        tiled_loss(model, [x], 2)
    with pytest.raises(ValueError, match="reduction='max'"):
        tiled_loss(model, [x], 2, reduction="max")  # type: ignore[arg-type]
