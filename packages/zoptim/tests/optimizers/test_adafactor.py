"""Adafactor against its rule and torch: steps, signals, state, errors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import zoptim
from zoptim import AdafactorMoments, adafactor_rule

SHAPES = [(7,), (3, 5), (), (64,), (2, 3, 4, 5), (3, 5)]
OPTIONS: list[dict[str, Any]] = [
    {"lr": 0.05},
    {"lr": 0.1, "weight_decay": 0.1, "maximize": True},
    {"lr": 0.5, "beta2_decay": -0.5, "eps": (1e-6, 1e-2), "d": 1.5},
]


@pytest.fixture(params=OPTIONS, ids=["default", "decay, maximize", "all else"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(request.param)


@pytest.fixture(params=[None, True, False], ids=["default", "foreach", "for"])
def foreach(request: pytest.FixtureRequest) -> bool | None:
    found: bool | None = request.param
    return found


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_twelve_steps_follow_the_pure_rule_in_float64(
    options: dict[str, Any], foreach: bool | None, dtype: torch.dtype, tolerance: float, lab: Any
) -> None:
    params = lab.make_params(SHAPES, dtype)
    eps = options.get("eps", (torch.finfo(dtype).eps, 1e-3))  # of the dtype under test
    expected = [param.detach().double().clone() for param in params]
    memory = [AdafactorMoments.zeros(weight) for weight in expected]
    lab.run(zoptim.Adafactor(params, **options, foreach=foreach), params, range(12), SHAPES)
    for step in range(12):
        for i, grad in enumerate(lab.make_grads(step, SHAPES)):
            expected[i], memory[i] = adafactor_rule(expected[i], grad.double(), memory[i], **{**options, "eps": eps})
    lab.assert_near(params, expected, rtol=tolerance, atol=tolerance)


def test_steps_equal_torch_bit_for_bit(options: dict[str, Any], foreach: bool | None, lab: Any) -> None:
    ours, theirs = lab.make_params(SHAPES), lab.make_params(SHAPES)
    lab.run(zoptim.Adafactor(ours, **options, foreach=foreach), ours, range(5), SHAPES)
    lab.run(torch.optim.Adafactor(theirs, **options, foreach=foreach), theirs, range(5), SHAPES)
    lab.assert_bitwise(ours, theirs)


def test_a_power_of_two_scale_changes_no_bit_and_gradients_are_never_written(lab: Any) -> None:
    plain, scaled = lab.make_params(SHAPES), lab.make_params(SHAPES)
    lab.run(zoptim.Adafactor(plain), plain, range(3), SHAPES)
    optimizer = zoptim.Adafactor(scaled)
    optimizer.grad_scale = torch.tensor(512.0)
    for step in range(3):
        grads = [512 * grad for grad in lab.make_grads(step, SHAPES)]
        for param, grad in zip(scaled, grads):
            param.grad = grad.clone()
        kept = [param.grad for param in scaled]
        optimizer.step()
        assert all(param.grad is grad for param, grad in zip(scaled, kept))
        lab.assert_bitwise(kept, grads)
    lab.assert_bitwise(scaled, plain)
    assert optimizer.grad_scale == 512.0


@pytest.mark.parametrize("found", [1.0, 2.0, float("nan")])
@pytest.mark.parametrize("steps_before", [0, 3])
def test_found_inf_leaves_everything_untouched(found: float, steps_before: int, lab: Any) -> None:
    params, undisturbed = lab.make_params(SHAPES), lab.make_params(SHAPES)
    optimizer, other = zoptim.Adafactor(params), zoptim.Adafactor(undisturbed)
    lab.run(optimizer, params, range(steps_before), SHAPES)
    before = lab.snapshot(optimizer, params)
    for param in params:
        param.grad = torch.full_like(param, float("nan"))
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor([found])
    optimizer.step()
    lab.assert_bitwise(lab.snapshot(optimizer, params), before)
    assert all(bool(param.grad.isnan().all()) for param in params if param.grad is not None)
    optimizer.grad_scale = optimizer.found_inf = None
    lab.run(optimizer, params, range(steps_before, 6), SHAPES)
    lab.run(other, undisturbed, range(6), SHAPES)
    lab.assert_bitwise(lab.snapshot(optimizer, params), lab.snapshot(other, undisturbed))


def test_gradients_come_back_even_from_a_step_that_fails(lab: Any) -> None:
    dense, sparse = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
    optimizer = zoptim.Adafactor([dense, sparse])
    optimizer.grad_scale = torch.tensor(2.0)
    dense.grad, sparse.grad = torch.ones(4), torch.ones(4).to_sparse()
    kept = dense.grad, sparse.grad
    with pytest.raises((RuntimeError, TypeError), match="sparse"):
        optimizer.step()
    assert (dense.grad, sparse.grad) == kept
    assert torch.equal(dense.detach(), torch.ones(4))
    assert optimizer.grad_scale == 2.0


def test_torch_grad_scaler_drives_it(lab: Any) -> None:
    ours, theirs = lab.make_params(SHAPES), lab.make_params(SHAPES)
    pairs = ((ours, zoptim.Adafactor(ours)), (theirs, torch.optim.Adafactor(theirs)))
    for params, optimizer in pairs:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for step in range(6):
            scaler.scale(torch.ones(()))
            for param, grad in zip(params, lab.make_grads(step, SHAPES)):
                param.grad = grad * (float("inf") if step == 3 else scaler.get_scale())
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0**11
    lab.assert_bitwise(ours, theirs)


def test_the_adapter_for_any_optimizer_leaves_it_its_own_attributes(lab: Any) -> None:
    ours, plain = lab.make_params(SHAPES), lab.make_params(SHAPES)
    adapter = zoptim.accept_grad_scale(zoptim.Adafactor(ours))
    lab.run(zoptim.Adafactor(plain), plain, range(2), SHAPES)
    adapter.grad_scale = torch.tensor(8.0)
    for step in range(2):
        for param, grad in zip(ours, lab.make_grads(step, SHAPES)):
            param.grad = 8 * grad
        adapter.step()
    lab.assert_bitwise(ours, plain)


@pytest.mark.parametrize("to_torch", [True, False], ids=["into torch", "from torch"])
def test_state_moves_between_torch_and_here(to_torch: bool, options: dict[str, Any], lab: Any) -> None:
    straight, moved = lab.make_params(SHAPES), lab.make_params(SHAPES)
    classes: list[Any] = [zoptim.Adafactor, torch.optim.Adafactor]
    first, second = classes if to_torch else classes[::-1]
    lab.run(first(straight, **options), straight, range(6), SHAPES)
    source, target = first(moved, **options), second(moved, **options)
    lab.run(source, moved, range(3), SHAPES)
    written = copy.deepcopy(source.state_dict())
    target.load_state_dict(written)
    lab.run(target, moved, range(3, 6), SHAPES)
    lab.assert_bitwise(moved, straight)
    assert lab.state_keys(target.state_dict()) == lab.state_keys(written)
    assert lab.state_keys(written)[1] == {"step", "row_var", "col_var"}
    assert lab.state_keys(written)[0] == {"step", "variance"}


def test_a_copy_is_independent_and_steps_alike(lab: Any) -> None:
    params = lab.make_params(SHAPES)
    optimizer = zoptim.Adafactor(params)
    lab.run(optimizer, params, range(2), SHAPES)
    twin = copy.deepcopy(optimizer)
    twins = twin.param_groups[0]["params"]
    lab.run(optimizer, params, range(2, 4), SHAPES)
    lab.run(twin, twins, range(2, 4), SHAPES)
    lab.assert_bitwise(twins, params)


def test_a_matrix_costs_its_rows_plus_its_columns(lab: Any) -> None:
    param = torch.ones(100, 200, requires_grad=True)
    param.grad = torch.ones(100, 200)
    optimizer = zoptim.Adafactor([param])
    optimizer.step()
    assert sum(value.numel() for key, value in optimizer.state[param].items() if key != "step") == 300


def test_a_closure_is_evaluated_with_gradients_and_its_loss_returned(lab: Any) -> None:
    param = torch.ones(4, requires_grad=True)
    optimizer = zoptim.Adafactor([param])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4.0
    assert not torch.equal(param.detach(), torch.ones(4))


def test_step_hooks_run_once(lab: Any) -> None:
    torch.optim.Adafactor(lab.make_params(SHAPES))
    params = lab.make_params(SHAPES)
    optimizer = zoptim.Adafactor(params)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    lab.run(optimizer, params, range(1), SHAPES)
    assert seen == ["before", "after"]


def test_it_declares_that_it_is_not_elementwise_and_reads_signals() -> None:
    assert zoptim.Adafactor.elementwise is False
    assert zoptim.Adafactor._step_supports_amp_scaling is True


def test_a_quadratic_converges(lab: Any) -> None:
    param = torch.full((12, 8), 3.0, requires_grad=True)
    optimizer = zoptim.Adafactor([param], lr=0.05)
    for _ in range(300):
        optimizer.zero_grad()
        (param - 1).square().sum().backward()
        optimizer.step()
    assert (param - 1).abs().max() < 0.1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lr": -1.0}, r"lr is -1\.0; it must be a number in \[0, inf\)"),
        ({"beta2_decay": 0.1}, r"beta2_decay is 0\.1; it must be at most 0"),
        ({"d": 0.0}, "d is 0"),
        ({"eps": (-1.0, 1e-3)}, r"eps\[0\] is -1\.0"),
        ({"eps": (None, -1e-3)}, r"eps\[1\] is -0\.001"),
        ({"weight_decay": -0.1}, r"weight_decay is -0\.1"),
    ],
    ids=str,
)
def test_options_out_of_range_raise(given: dict[str, Any], message: str, lab: Any) -> None:
    with pytest.raises(ValueError, match=message):
        zoptim.Adafactor(lab.make_params(SHAPES), **given)
    optimizer = zoptim.Adafactor(lab.make_params(SHAPES))
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": lab.make_params([(4,)]), **given})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("given", [{"eps": 1e-3}, {"eps": (None, None)}, {"lr": "0.1"}], ids=str)
def test_options_of_another_kind_raise(given: dict[str, Any], lab: Any) -> None:
    with pytest.raises(TypeError, match=f"{next(iter(given))}.* is .*; it must be"):
        zoptim.Adafactor(lab.make_params(SHAPES), **given)


def test_signals_that_are_no_one_element_tensors_raise_with_their_names(lab: Any) -> None:
    params = lab.make_params(SHAPES)
    optimizer = zoptim.Adafactor(params)
    optimizer.grad_scale = 2.0  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"grad_scale is 2\.0; it must be a tensor of one element"):
        lab.run(optimizer, params, range(1), SHAPES)


def test_state_of_another_shape_raises_and_changes_nothing(lab: Any) -> None:
    big, small = [torch.ones(8, 3, requires_grad=True)], [torch.ones(4, 3, requires_grad=True)]
    source, target = zoptim.Adafactor(big), zoptim.Adafactor(small)
    lab.run(source, big, range(1), [(8, 3)])
    lab.run(target, small, range(1), [(4, 3)])
    before = lab.snapshot(target, small)
    with pytest.raises(ValueError, match=r"row_var of parameter 0 of group 0 has shape \(8, 1\)"):
        target.load_state_dict(copy.deepcopy(source.state_dict()))
    lab.assert_bitwise(lab.snapshot(target, small), before)


def test_complex_parameters_raise_with_their_names() -> None:
    with pytest.raises(zoptim.UnsupportedTensorError, match="parameter 0 of group 0 is complex"):
        zoptim.Adafactor([torch.ones(2, dtype=torch.complex64, requires_grad=True)])
