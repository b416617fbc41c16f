from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zoptim
from zoptim import GradScaled, accept_grad_scale, supports_grad_scale

MAKERS = {
    "zoptim.AdamW": lambda params: zoptim.AdamW(params, lr=0.1),
    "zoptim.SGD": lambda params: zoptim.SGD(params, lr=0.1, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "SGD fused": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.1),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.1),
}
every = pytest.mark.parametrize("name", MAKERS)


def make_params() -> list[Tensor]:
    return [torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_(), torch.ones(5, requires_grad=True)]


def set_grads(params: list[Tensor], factor: float = 1.0) -> None:
    for param in params:
        param.grad = factor * torch.cos(3 * param.detach())


def weights(params: list[Tensor]) -> Tensor:
    return torch.cat([param.detach().flatten() for param in params])


@pytest.mark.parametrize(
    ("optimizer", "speaks"),
    [
        (zoptim.AdamW(make_params()), True),
        (zoptim.SGD(make_params(), foreach=True), True),
        (torch.optim.AdamW(make_params(), fused=True), True),
        (torch.optim.AdamW(make_params()), False),
        (torch.optim.RMSprop(make_params()), False),
    ],
)
def test_which_optimizers_support_grad_scale(optimizer: torch.optim.Optimizer, speaks: bool) -> None:
    assert supports_grad_scale(optimizer) is speaks


def test_torch_fused_no_longer_speaks_once_a_group_is_not_fused() -> None:
    optimizer = torch.optim.AdamW(make_params(), fused=True)
    optimizer.param_groups[0]["fused"] = False
    assert not supports_grad_scale(optimizer)
    adapted = accept_grad_scale(optimizer)
    adapted.grad_scale = torch.tensor(2.0)
    set_grads(optimizer.param_groups[0]["params"])
    adapted.step()


@every
def test_the_adapter_divides_the_gradients_of_a_plain_step(name: str) -> None:
    plain, scaled = make_params(), make_params()
    optimizer, adapted = MAKERS[name](plain), accept_grad_scale(MAKERS[name](scaled))
    for _ in range(3):
        set_grads(plain)
        optimizer.step()
        set_grads(scaled, 64.0)
        adapted.grad_scale = torch.tensor(64.0)
        adapted.step()
        adapted.grad_scale = None
    assert torch.equal(weights(scaled), weights(plain))


@every
@pytest.mark.parametrize("found", [1.0, 3.0, float("nan")])
def test_a_set_found_inf_skips_even_the_first_step_and_leaves_the_next_one_right(name: str, found: float) -> None:
    plain, skipped = make_params(), make_params()
    optimizer, adapted = MAKERS[name](plain), accept_grad_scale(MAKERS[name](skipped))
    set_grads(skipped, float("inf"))
    adapted.grad_scale, adapted.found_inf = torch.tensor(2.0), torch.tensor(found)
    assert adapted.step() is None
    assert torch.equal(weights(skipped), weights(plain))
    adapted.found_inf = torch.tensor(0.0)
    set_grads(plain)
    optimizer.step()
    set_grads(skipped, 2.0)
    adapted.step()
    assert torch.equal(weights(skipped), weights(plain))


@every
def test_without_signals_the_adapter_is_the_optimizer(name: str) -> None:
    plain, adapted_params = make_params(), make_params()
    adapted = accept_grad_scale(MAKERS[name](adapted_params))
    set_grads(plain)
    set_grads(adapted_params)
    MAKERS[name](plain).step()
    adapted.step()
    assert torch.equal(weights(adapted_params), weights(plain))
    assert isinstance(adapted.optimizer, torch.optim.Optimizer)


def test_the_adapter_of_our_own_optimizers_is_a_view_of_their_attributes() -> None:
    optimizer = zoptim.AdamW(make_params())
    adapted = accept_grad_scale(optimizer)
    adapted.grad_scale, adapted.found_inf = torch.tensor(2.0), torch.tensor(1.0)
    assert optimizer.grad_scale is adapted.grad_scale
    assert optimizer.found_inf is adapted.found_inf
    assert adapted.optimizer is optimizer


def test_a_fused_torch_optimizer_keeps_no_signal_after_the_step() -> None:
    optimizer: Any = torch.optim.AdamW(make_params(), fused=True)
    adapted = accept_grad_scale(optimizer)
    adapted.grad_scale = torch.tensor(2.0)
    set_grads(optimizer.param_groups[0]["params"])
    adapted.step()
    assert not hasattr(optimizer, "grad_scale")


def test_parameters_without_gradients_and_sparse_gradients_are_handled() -> None:
    plain, scaled = (torch.ones(4, requires_grad=True) for _ in range(2))
    plain.grad = torch.tensor([0.0, 3.0, 0.0, 1.0]).to_sparse()
    scaled.grad = torch.tensor([0.0, 24.0, 0.0, 8.0]).to_sparse()
    torch.optim.SparseAdam([plain], lr=0.1).step()
    adapted = accept_grad_scale(torch.optim.SparseAdam([scaled, torch.ones(2, requires_grad=True)], lr=0.1))
    adapted.grad_scale = torch.tensor(8.0)
    adapted.step()
    assert torch.equal(plain.detach(), scaled.detach())


def test_a_closure_has_its_gradients_divided_every_time_it_is_called() -> None:
    results = []
    for factor in (1.0, 16.0):
        param = torch.full((3,), 2.0, requires_grad=True)
        adapted = GradScaled(torch.optim.LBFGS([param], lr=0.5, max_iter=3))
        adapted.grad_scale = torch.tensor(factor)
        results.append((step_with_closure(adapted, param, factor), param.detach().clone()))
    assert results[0][0] == 12.0
    assert torch.equal(results[0][1], results[1][1])


def step_with_closure(adapted: GradScaled, param: Tensor, factor: float) -> float:
    def closure() -> Tensor:
        param.grad = None
        loss = (param**2).sum()
        (loss * factor).backward()
        return loss

    return float(adapted.step(closure).detach())


def test_anything_but_an_optimizer_raises() -> None:
    with pytest.raises(TypeError, match=r"optimizer is a list; it must be a torch\.optim\.Optimizer"):
        accept_grad_scale([])  # type: ignore[arg-type]


def test_a_signal_that_is_no_tensor_raises() -> None:
    adapted = accept_grad_scale(torch.optim.SGD(make_params(), lr=0.1))
    adapted.grad_scale = 2.0  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"grad_scale is 2\.0"):
        adapted.step()
