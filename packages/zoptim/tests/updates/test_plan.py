"""A plan is made once and reused while it is valid; no kernel writes to memory that was replaced."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zoptim

SHAPES = [(4, 4), (3,), (4, 4)]


class Forgetful:
    """An optimizer that makes a new plan at every step: the oracle of cached plans."""

    def __init__(self, optimizer: zoptim.FlatOptimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.clear_plans()
        self.optimizer.step()


@pytest.fixture
def plans_made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The groups that plans were made for, in order."""
    made: list[int] = []
    make_plan = zoptim.FlatOptimizer._make_plan

    def counted(self: Any, index: int, *rest: Any) -> Any:
        made.append(index)
        return make_plan(self, index, *rest)

    monkeypatch.setattr(zoptim.FlatOptimizer, "_make_plan", counted)
    return made


def memory_of(optimizer: Any, params: list[Tensor]) -> list[Tensor]:
    """Aliases of all memory that a step writes, which remain valid when a tensor gets other memory."""
    state = [value for param in params for value in optimizer.state[param].values()]
    return [tensor.detach() for tensor in [*params, *state]]


# Keeping a plan ---------------------------------------------------------------------------------------


def test_the_same_objects_need_no_second_plan(kind: Any, lab: Any, plans_made: list[int]) -> None:
    params = lab.make_params(SHAPES)
    optimizer = kind.make(params)
    lab.run(optimizer, params, range(2), SHAPES)
    plans_made.clear()
    for _ in range(3):
        optimizer.step()
    assert plans_made == []


def test_new_gradients_of_the_same_kind_need_no_second_plan(kind: Any, lab: Any, plans_made: list[int]) -> None:
    params = lab.make_params(SHAPES)
    optimizer = kind.make(params)
    lab.run(optimizer, params, range(2), SHAPES)
    plans_made.clear()
    kept = [param.grad for param in params]  # so that the next ones lie elsewhere
    lab.run(optimizer, params, range(2, 5), SHAPES)
    assert plans_made == []
    assert kept


def test_new_numbers_need_no_second_plan_and_count_at_once(lab: Any, plans_made: list[int]) -> None:
    params = lab.make_params(SHAPES)
    optimizer = zoptim.AdamW(params, lr=0.1, weight_decay=0.1)
    lab.run(optimizer, params, range(1), SHAPES)
    before = lab.snapshot(optimizer, params)[: len(params)]
    optimizer.param_groups[0].update(lr=0.0, betas=(0.5, 0.5), eps=1e-3, weight_decay=0.0)
    lab.run(optimizer, params, range(1, 2), SHAPES)
    assert plans_made == [0]
    lab.assert_bitwise(params, before)


def test_other_groups_keep_their_plans(lab: Any, plans_made: list[int]) -> None:
    params = lab.make_params(SHAPES)
    optimizer = zoptim.AdamW([{"params": params[:1]}, {"params": params[1:]}])
    lab.run(optimizer, params, range(1), SHAPES)
    lab.run(optimizer, params, range(1, 2), SHAPES)
    plans_made.clear()
    optimizer.param_groups[1]["maximize"] = True
    lab.run(optimizer, params, range(2, 4), SHAPES)
    assert plans_made == [1]


# New plans ---------------------------------------------------------------------------------------------


def replace_weight(optimizer: Any, params: list[Tensor]) -> None:
    params[0].data = params[0].data.clone()


def offload_and_reload_weight(optimizer: Any, params: list[Tensor]) -> None:
    kept = params[0].data.clone()
    params[0].data = torch.empty(0)
    params[0].data = kept


def replace_weight_in_another_layout(optimizer: Any, params: list[Tensor]) -> None:
    params[0].data = params[0].data.t().contiguous().t()


def transpose_weight(optimizer: Any, params: list[Tensor]) -> None:
    """At the same address."""
    params[0].data = params[0].data.t()


def replace_the_parameter_by_an_alias(optimizer: Any, params: list[Tensor]) -> None:
    params[0] = params[0].detach().requires_grad_()
    optimizer.param_groups[0]["params"][0] = params[0]


def swap_two_parameters(optimizer: Any, params: list[Tensor]) -> None:
    params[0].data, params[2].data = params[2].data, params[0].data


def replace_state_tensors(optimizer: Any, params: list[Tensor]) -> None:
    state = optimizer.state[params[0]]
    state.update({key: value.clone() for key, value in state.items()})


def move_the_data_of_state_tensors(optimizer: Any, params: list[Tensor]) -> None:
    for value in optimizer.state[params[0]].values():
        value.data = value.data.clone()


def replace_the_state(optimizer: Any, params: list[Tensor]) -> None:
    optimizer.state[params[0]] = {key: value.clone() for key, value in optimizer.state[params[0]].items()}


def drop_the_state_of_one(optimizer: Any, params: list[Tensor]) -> None:
    del optimizer.state[params[0]]


def drop_all_state(optimizer: Any, params: list[Tensor]) -> None:
    optimizer.state.clear()


def load_state(optimizer: Any, params: list[Tensor]) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def flip_an_option(optimizer: Any, params: list[Tensor]) -> None:
    optimizer.param_groups[0]["maximize"] = not optimizer.param_groups[0]["maximize"]


def choose_the_torch_path(optimizer: Any, params: list[Tensor]) -> None:
    optimizer.param_groups[0]["foreach"] = True


def remove_a_parameter(optimizer: Any, params: list[Tensor]) -> None:
    optimizer.param_groups[0]["params"].pop(1)


def add_a_group(optimizer: Any, params: list[Tensor]) -> None:
    params.append(torch.ones(5, requires_grad=True))
    optimizer.add_param_group({"params": params[-1:]})


CHANGES = [
    replace_weight,
    offload_and_reload_weight,
    replace_weight_in_another_layout,
    transpose_weight,
    replace_the_parameter_by_an_alias,
    swap_two_parameters,
    replace_state_tensors,
    move_the_data_of_state_tensors,
    replace_the_state,
    drop_the_state_of_one,
    drop_all_state,
    load_state,
    flip_an_option,
    choose_the_torch_path,
    remove_a_parameter,
    add_a_group,
]


def change_midway(
    kind: Any, change: Callable[[Any, list[Tensor]], None], lab: Any, forgetful: bool, **more: Any
) -> tuple[Any, list[Tensor], list[tuple[Tensor, Tensor]]]:
    """Two steps, the change, three steps; also the memory before the change: (alias, copy)."""
    params = lab.make_params(SHAPES)
    optimizer = kind.make(params, **more)
    stepper = Forgetful(optimizer) if forgetful else optimizer
    shapes = [*SHAPES, (5,)]
    lab.run(stepper, params, range(2), shapes)
    before = memory_of(optimizer, params)
    copies = [tensor.clone() for tensor in before]
    change(optimizer, params)
    lab.run(stepper, params, range(2, 5), shapes)
    return optimizer, params, list(zip(before, copies))


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_cached_plan_equals_a_new_one_after_every_change(kind: Any, change: Any, lab: Any) -> None:
    optimizer, params, before = change_midway(kind, change, lab, forgetful=False)
    other, others, _ = change_midway(kind, change, lab, forgetful=True)
    lab.assert_bitwise(lab.snapshot(optimizer, params), lab.snapshot(other, others))
    now = {tensor.data_ptr() for tensor in memory_of(optimizer, params)}
    for alias, copied in before:
        if alias.data_ptr() not in now:
            assert torch.equal(alias, copied), "memory was written that no longer belongs to the optimizer"


def test_a_plan_that_another_groups_error_interrupted_is_not_used_for_the_memory_before(lab: Any) -> None:
    first, second = lab.make_params([(4,), (4,)])
    optimizer = zoptim.SGD([{"params": [first]}, {"params": [second]}], lr=1.0)
    first.grad, second.grad = torch.ones(4), torch.ones(4)
    optimizer.step()
    before, moved = first.data, first.data.clone()
    first.data, second.grad = moved, second.detach()  # a gradient in the memory of its weight
    with pytest.raises(ValueError, match="overlaps a weight"):
        optimizer.step()
    first.data, second.grad = before, torch.ones(4)
    expected, kept = before.clone() - 1.0, moved.clone()
    optimizer.step()
    assert torch.equal(first.detach(), expected)
    assert torch.equal(moved, kept)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_kernels_and_torch_agree_after_every_change(kind: Any, change: Any, lab: Any) -> None:
    optimizer, params, _ = change_midway(kind, change, lab, forgetful=False)
    other, others, _ = change_midway(kind, change, lab, forgetful=False, foreach=True)
    lab.assert_near(lab.snapshot(optimizer, params), lab.snapshot(other, others), rtol=2e-5, atol=1e-6)


def test_a_parameter_whose_gradient_comes_and_goes_is_updated_when_it_has_one(kind: Any, path: Any, lab: Any) -> None:
    pattern = [
        (True, True, True),
        (True, False, True),
        (False, False, False),
        (True, True, False),
        (True, True, True),
    ]
    params, alone = lab.make_params(SHAPES), lab.make_params(SHAPES)
    optimizer, single = kind.make(params, **path), [kind.make([param], **path) for param in alone]
    for step, present in enumerate(pattern):
        for i, grad in enumerate(lab.make_grads(step, SHAPES)):
            params[i].grad = grad if present[i] else None
            alone[i].grad = grad
            if present[i]:
                single[i].step()
        optimizer.step()
    lab.assert_bitwise(params, alone)


def test_gradients_in_another_layout_are_read_right_and_left_alone(kind: Any, lab: Any) -> None:
    params, others = lab.make_params([(4, 6)]), lab.make_params([(4, 6)])
    optimizer, other = kind.make(params), kind.make(others)
    for step in range(5):
        (grad,) = lab.make_grads(step, [(4, 6)])
        params[0].grad = grad.t().contiguous().t() if step % 2 else grad.clone()
        others[0].grad = grad
        strides = params[0].grad.stride()
        optimizer.step()
        other.step()
        assert (params[0].grad.stride(), torch.equal(params[0].grad, grad)) == (strides, True)
    lab.assert_bitwise(params, others)


def test_a_gradient_that_is_written_in_place_in_another_layout_is_read_at_every_step(kind: Any, lab: Any) -> None:
    """The copy in the parameter's layout must not be reused."""
    params, others = lab.make_params([(4, 6)]), lab.make_params([(4, 6)])
    optimizer, other = kind.make(params), kind.make(others)
    params[0].grad = torch.zeros(6, 4).t()
    for step in range(3):
        (grad,) = lab.make_grads(step, [(4, 6)])
        params[0].grad.copy_(grad)
        others[0].grad = grad
        optimizer.step()
        other.step()
    lab.assert_bitwise(params, others)


@pytest.mark.parametrize(
    "grad", [torch.ones(()).expand(4, 6), torch.ones(8, 12)[::2, ::2], torch.ones(1, 6).expand(4, 6)]
)
def test_expanded_and_strided_gradients_are_read_by_value(kind: Any, grad: Tensor, lab: Any) -> None:
    params, others = lab.make_params([(4, 6)]), lab.make_params([(4, 6)])
    for param, given in ((params[0], grad), (others[0], grad.contiguous())):
        optimizer = kind.make([param])
        param.grad = given
        for _ in range(2):
            optimizer.step()
    lab.assert_bitwise(params, others)


@pytest.mark.filterwarnings("ignore:.*elements are not dense in memory")
def test_a_parameter_with_holes_is_updated_and_the_holes_are_not(kind: Any, lab: Any) -> None:
    base = torch.arange(16.0)
    param, dense = base[::2].requires_grad_(), base[::2].clone().requires_grad_()
    lab.run(kind.make([param]), [param], range(3), [(8,)])
    lab.run(kind.make([dense]), [dense], range(3), [(8,)])
    lab.assert_near([param], [dense], rtol=2e-5, atol=1e-6)
    assert torch.equal(base.detach()[1::2], torch.arange(1.0, 16.0, 2))


def test_a_view_into_a_larger_tensor_leaves_the_rest_alone(kind: Any, lab: Any) -> None:
    base = torch.arange(16.0)
    param, alone = base[3:10].requires_grad_(), base[3:10].clone().requires_grad_()
    lab.run(kind.make([param]), [param], range(3), [(7,)])
    lab.run(kind.make([alone]), [alone], range(3), [(7,)])
    lab.assert_bitwise([param], [alone])
    rest = torch.cat([base.detach()[:3], base.detach()[10:]])
    assert torch.equal(rest, torch.cat([torch.arange(3.0), torch.arange(10.0, 16.0)]))


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (1, 1)])
def test_tiny_tensors_alone_in_an_optimizer_are_updated(
    kind: Any, path: Any, shape: tuple[int, ...], lab: Any
) -> None:
    params, others = lab.make_params([shape]), lab.make_params([shape, (40,)])
    lab.run(kind.make(params, **path), params, range(4), [shape])
    lab.run(kind.make(others, **path), others, range(4), [shape, (40,)])
    lab.assert_near(params, others[:1], rtol=2e-6, atol=1e-7)
