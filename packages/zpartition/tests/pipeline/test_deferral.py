import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zpartition.pipeline.deferral import LaterProducts, WeightsLater


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3, bias=False))


def gradients(net: nn.Module) -> list[torch.Tensor | None]:
    return [param.grad for param in net.parameters()]


@pytest.mark.parametrize("recomputed", [False, True])
def test_weights_wait_and_all_else_comes_at_once(recomputed: bool) -> None:
    data = torch.randn(2, 5, 4)
    whole, halves, later = model(), model(), LaterProducts()
    expected, value = data.clone().requires_grad_(), data.clone().requires_grad_()
    whole(expected).square().sum().backward()

    def forward(given: torch.Tensor) -> torch.Tensor:
        with WeightsLater(later):
            return halves(given)

    output = checkpoint(forward, value, use_reentrant=False) if recomputed else forward(value)
    arrived = []
    halves[0].weight.register_post_accumulate_grad_hook(arrived.append)
    output.square().sum().backward()
    assert torch.equal(value.grad, expected.grad)
    assert [each is None for each in gradients(halves)] == [True, False, False, False, True]
    assert (len(later.factors), arrived) == (2, [])
    later.finish()
    assert (len(later.factors), len(arrived)) == (0, 1)  # through autograd: hooks of the parameter see it
    for mine, its in zip(gradients(halves), gradients(whole)):
        torch.testing.assert_close(mine, its)


def test_what_cannot_wait_does_not() -> None:
    later, layer, data = LaterProducts(), nn.Linear(4, 4), torch.randn(2, 4)
    with WeightsLater(later), torch.autocast("cpu", dtype=torch.bfloat16):
        layer(data).float().sum().backward()
    with WeightsLater(later):
        (nn.functional.linear(data, layer.weight * 2)).sum().backward()
    assert later.factors == []
    assert layer.weight.grad is not None
