from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zpartition.pipeline.deferral import DeferredWeightGrads, DeferWeightGrads


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3, bias=False))


def gradients(net: nn.Module) -> list[torch.Tensor | None]:
    return [param.grad for param in net.parameters()]


@pytest.mark.parametrize("recomputed", [False, True])
def test_only_weight_gradients_are_deferred(recomputed: bool) -> None:
    data = torch.randn(2, 5, 4)
    whole, halves, deferred = model(), model(), DeferredWeightGrads()
    expected, value = data.clone().requires_grad_(), data.clone().requires_grad_()
    whole(expected).square().sum().backward()

    def forward(given: torch.Tensor) -> torch.Tensor:
        with DeferWeightGrads(deferred):
            return halves(given)

    output = checkpoint(forward, value, use_reentrant=False) if recomputed else forward(value)
    arrived = []
    halves[0].weight.register_post_accumulate_grad_hook(arrived.append)
    output.square().sum().backward()
    assert torch.equal(value.grad, expected.grad)
    assert [each is None for each in gradients(halves)] == [True, False, False, False, True]
    assert (len(deferred.factors), arrived) == (2, [])
    deferred.finish()
    assert (len(deferred.factors), len(arrived)) == (0, 1)  # through autograd: hooks of the parameter see it
    for mine, its in zip(gradients(halves), gradients(whole)):
        torch.testing.assert_close(mine, its)


class Checkpointed(nn.Module):
    """Checkpoints its inner layers, as user code does."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.inside, self.use_reentrant = model(), use_reentrant

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inside, value, use_reentrant=self.use_reentrant)  # type: ignore[no-any-return]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_layer_that_checkpoints_itself_recomputes_the_same_operations(use_reentrant: bool) -> None:
    data = torch.randn(2, 5, 4)
    whole, halves, deferred = model(), Checkpointed(use_reentrant=use_reentrant), DeferredWeightGrads()
    expected, value = data.clone().requires_grad_(), data.clone().requires_grad_()
    whole(expected).square().sum().backward()
    with DeferWeightGrads(deferred):
        output = halves(value)
    deferred.backward([output.square().sum()], [torch.ones(())])
    assert torch.equal(value.grad, expected.grad)
    assert len(deferred.factors) == (0 if use_reentrant else 2)  # re-entrant ones are differentiated at once
    deferred.finish()
    for mine, its in zip(gradients(halves), gradients(whole)):
        torch.testing.assert_close(mine, its)


class Again(torch.autograd.Function):
    """A node whose backward computes and differentiates a product."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(value, weight)
        ctx.weight = weight
        return nn.functional.linear(value, weight)

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> Any:
        with torch.enable_grad():
            value = ctx.saved_tensors[0].detach().requires_grad_()
            output = nn.functional.linear(value, ctx.weight)
        return torch.autograd.grad(output, [value, ctx.weight], given)


def test_a_function_that_calls_autograd_in_backward_gets_its_gradients() -> None:
    deferred, weight, data = (
        DeferredWeightGrads(),
        nn.Parameter(torch.ones(2, 3)),
        torch.randn(4, 3, requires_grad=True),
    )
    with DeferWeightGrads(deferred):
        output = Again.apply(data, weight)
    deferred.backward([output], [torch.ones(4, 2)])
    assert deferred.factors == []
    torch.testing.assert_close(weight.grad, data.detach().sum(0).expand(2, 3))


def test_other_gradients_are_not_deferred() -> None:
    deferred, layer, data = DeferredWeightGrads(), nn.Linear(4, 4), torch.randn(2, 4)
    with DeferWeightGrads(deferred), torch.autocast("cpu", dtype=torch.bfloat16):
        layer(data).float().sum().backward()
    with DeferWeightGrads(deferred):
        (nn.functional.linear(data, layer.weight * 2)).sum().backward()
    assert deferred.factors == []
    assert layer.weight.grad is not None
