"""0/1 Adam: its intervals, its pure rule, and what ranks do not share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import zoptim
from zoptim import WholeTensors, ZeroOneAdam, ZeroOneClock, ZeroOneMoments, ZeroOnePolicy, zero_one_adam_rule


def updates(kappa: int, steps: int) -> list[int]:
    clock, policy, found = ZeroOneClock(), ZeroOnePolicy(var_update_scaler=kappa), []
    for step in range(1, steps + 1):
        if clock.next_updates_variance:
            found.append(step)
        clock = clock.after_step(policy)
    return found


def test_second_moments_are_updated_ever_more_rarely() -> None:
    found = updates(16, 2000)
    assert found[:19] == [*range(1, 17), 18, 20, 22]
    assert len(found) == 112
    assert updates(2, 33) == [1, 2, 4, 6, 8, 12, 16, 24, 32]


def test_local_steps_grow_up_to_the_clipper() -> None:
    policy = ZeroOnePolicy(var_freeze_step=3, local_step_scaler=4, local_step_clipper=4)
    clock, synchronized = ZeroOneClock(), []
    for step in range(1, 25):
        if clock.next_synchronizes:
            synchronized.append(step)
        clock = clock.after_step(policy)
    assert synchronized == [5, 6, 7, 8, 10, 12, 16, 20, 24], "frozen after step 4, the first past var_freeze_step"


def test_the_optimizer_updates_second_moments_as_the_clock_says() -> None:
    param = torch.zeros(3, requires_grad=True)
    optimizer = ZeroOneAdam([param])
    found, before = [], torch.zeros(3)
    for step in range(1, 2001):
        param.grad = torch.ones(3)
        optimizer.step()
        now = optimizer.state[param]["exp_avg_sq"]
        if not torch.equal(now, before):
            found.append(step)
            before = now.clone()
    assert found == updates(16, 2000)


def halved(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor / 2 for tensor in tensors]


def halve_(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        tensor.div_(2)


def test_the_optimizer_follows_its_pure_rule() -> None:
    generator = torch.Generator().manual_seed(3)
    params = [torch.randn(5, 3, generator=generator), torch.randn(20, generator=generator)]
    own = [param.clone().requires_grad_() for param in params]
    options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-3}
    policy = ZeroOnePolicy(var_freeze_step=9, var_update_scaler=2, local_step_scaler=3, local_step_clipper=4)
    optimizer = ZeroOneAdam(
        own, **options, var_freeze_step=9, var_update_scaler=2, local_step_scaler=3, local_step_clipper=4
    )
    optimizer.connect(WholeTensors(halve_, world_size=2))
    moments, clock = [ZeroOneMoments.zeros(param) for param in params], ZeroOneClock()
    kinds = set()
    for step in range(30):
        assert optimizer.needs_local_gradients is not clock.next_updates_variance
        kinds.add((clock.next_updates_variance, clock.frozen, clock.next_synchronizes))
        grads = [torch.randn(param.shape, generator=generator) for param in params]
        for param, grad in zip(own, grads):
            param.grad = grad.clone()
        optimizer.step()
        params, moments, clock = zero_one_adam_rule(params, grads, moments, clock, policy, mean=halved, **options)
        for param, expected, each in zip(own, params, moments):
            torch.testing.assert_close(param.detach(), expected, rtol=1e-5, atol=2e-6, msg=f"step {step}")
            torch.testing.assert_close(optimizer.state[param]["exp_avg"], each.exp_avg, rtol=1e-4, atol=1e-5)
    assert len(kinds) == 4, "exact, compressed, local and synchronizing steps"


def test_between_synchronizations_a_rank_has_weights_of_its_own() -> None:
    param = torch.zeros(4, requires_grad=True)
    optimizer = ZeroOneAdam([param], var_freeze_step=1, local_step_scaler=1, local_step_clipper=4)
    optimizer.connect(WholeTensors(halve_, world_size=2, rank_tensors={"error": torch.zeros(1)}))
    for _ in range(2):
        param.grad = torch.ones(4)
        optimizer.step()
    assert set(optimizer.rank_tensors()) == {"error"}
    for _ in range(3):
        param.grad = torch.ones(4)
        optimizer.step()
    assert optimizer.clock.step % optimizer.clock.local_interval
    assert set(optimizer.rank_tensors()) == {"error", "weight.0", "exp_avg.0", "momentum_accumulator.0"}
    assert optimizer.rank_tensors()["weight.0"].data_ptr() == param.data_ptr()
    optimizer.reset_ranks()
    assert not optimizer.state[param]["momentum_accumulator"].any()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"amsgrad": True}, RuntimeError, "0/1 Adam does not support amsgrad"),
        ({"var_freeze_step": 0}, ValueError, "var_freeze_step is 0; it must be a whole number >= 1"),
        ({"local_step_clipper": 0.5}, ValueError, "local_step_clipper is 0.5"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ZeroOneAdam([torch.zeros(1, requires_grad=True)], **options)


def test_configs_build_it() -> None:
    made = zoptim.make_optimizer("ZeroOneAdam", [torch.zeros(1, requires_grad=True)], {"var_freeze_step": 400})
    assert isinstance(made, ZeroOneAdam)
    assert made.policy.var_freeze_step == 400


def test_ranks_skip_together_while_gradients_are_local_before_the_freeze() -> None:
    def exact_mean(tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            tensor.add_(0.5)  # the other one of two ranks has found an infinity

    param = torch.ones(8, requires_grad=True)
    optimizer = ZeroOneAdam([param], lr=0.1, var_update_scaler=1)
    optimizer.connect(WholeTensors(halve_, world_size=2, exact_mean=exact_mean))
    for step in range(3):
        assert optimizer.needs_local_gradients == (step == 2)
        before, param.grad = param.detach().clone(), torch.ones(8)
        optimizer.grad_scale, optimizer.found_inf = None, torch.zeros(())
        optimizer.step()
        assert torch.equal(param, before) == (step == 2)
    assert optimizer.clock.step == 2
