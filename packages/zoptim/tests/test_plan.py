"""A plan is made once and kept while it tells the truth; no kernel writes to memory that was replaced."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zoptim
from zoptim.plan import (
    Entry,
    Path,
    in_layout_of,
    is_dense,
    kinds_of,
    same_objects,
    sort_entries,
    why_no_kernel,
)

SHAPES = [(4, 4), (3,), (4, 4)]


class Forgetful:
    """An optimizer that makes every plan anew: what a cached plan must not differ from."""

    def __init__(self, optimizer: zoptim.FlatOptimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer._forget()
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
    """Aliases of everything that a step writes, which stay what they are when a tensor is pointed elsewhere."""
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


# Making it anew ---------------------------------------------------------------------------------------


def replace_weight(optimizer: Any, params: list[Tensor]) -> None:
    params[0].data = params[0].data.clone()


def offload_and_reload_weight(optimizer: Any, params: list[Tensor]) -> None:
    kept = params[0].data.clone()
    params[0].data = torch.empty(0)
    params[0].data = kept


def replace_weight_in_another_layout(optimizer: Any, params: list[Tensor]) -> None:
    params[0].data = params[0].data.t().contiguous().t()


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
    """Two steps, the change, three steps.  Also what lay in memory before the change: (alias, copy)."""
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
def test_a_cached_plan_equals_one_made_anew_whatever_changes(kind: Any, change: Any, lab: Any) -> None:
    optimizer, params, before = change_midway(kind, change, lab, forgetful=False)
    other, others, _ = change_midway(kind, change, lab, forgetful=True)
    lab.assert_bitwise(lab.snapshot(optimizer, params), lab.snapshot(other, others))
    now = {tensor.data_ptr() for tensor in memory_of(optimizer, params)}
    for alias, copied in before:
        if alias.data_ptr() not in now:
            assert torch.equal(alias, copied), "memory was written that no longer belongs to the optimizer"


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_kernels_and_torch_agree_whatever_changes(kind: Any, change: Any, lab: Any) -> None:
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
    """Its copy in the parameter's layout must not outlive the step."""
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
def test_gradients_that_are_expanded_or_have_holes_are_read_as_what_they_show(
    kind: Any, grad: Tensor, lab: Any
) -> None:
    params, others = lab.make_params([(4, 6)]), lab.make_params([(4, 6)])
    for param, given in ((params[0], grad), (others[0], grad.contiguous())):
        optimizer = kind.make([param])
        param.grad = given
        for _ in range(2):
            optimizer.step()
    lab.assert_bitwise(params, others)


@pytest.mark.filterwarnings("ignore:.*elements do not lie densely in memory")
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
    params, beside = lab.make_params([shape]), lab.make_params([shape, (40,)])
    lab.run(kind.make(params, **path), params, range(4), [shape])
    lab.run(kind.make(beside, **path), beside, range(4), [shape, (40,)])
    lab.assert_near(params, beside[:1], rtol=2e-6, atol=1e-7)


# State that somebody else put there ---------------------------------------------------------------------


def as_number(state: dict[str, Any]) -> None:
    state["step"] = 2


def as_integers(state: dict[str, Any]) -> None:
    state["step"] = state["step"].to(torch.int64)


def with_a_dim(state: dict[str, Any]) -> None:
    state["step"] = state["step"].view(1)


def in_float64(state: dict[str, Any]) -> None:
    state["exp_avg"] = state["exp_avg"].double()


def turned(state: dict[str, Any]) -> None:
    state["exp_avg"] = state["exp_avg"].t().contiguous().t()


def with_holes(state: dict[str, Any]) -> None:
    wide = torch.zeros(4, 8)
    wide[:, ::2] = state["exp_avg"]
    state["exp_avg"] = wide[:, ::2]


def with_things_of_his_own(state: dict[str, Any]) -> None:
    state["note"] = "mine"


@pytest.mark.parametrize("tamper", [as_number, as_integers, with_a_dim, in_float64, turned, with_holes,
                                    with_things_of_his_own], ids=lambda tamper: tamper.__name__)  # fmt: skip
def test_state_that_no_kernel_could_read_as_it_is_means_what_it_says(tamper: Any, lab: Any) -> None:
    params, others = lab.make_params(SHAPES), lab.make_params(SHAPES)
    optimizer, other = zoptim.AdamW(params, lr=0.1), zoptim.AdamW(others, lr=0.1)
    for o, p in ((optimizer, params), (other, others)):
        lab.run(o, p, range(2), SHAPES)
    tamper(optimizer.state[params[0]])
    for o, p in ((optimizer, params), (other, others)):
        lab.run(o, p, range(2, 4), SHAPES)
    lab.assert_bitwise(params, others)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "exp_avg_scale",
            torch.ones(1),
            r"exp_avg_scale of parameter 0 of group 0 has shape \(1,\), it must be \(3,\)",
        ),
        ("exp_avg_scale", None, r"parameter 0 of group 0 lacks exp_avg_scale"),
        ("exp_avg", torch.ones(3), r"exp_avg of parameter 0 of group 0 has shape \(3,\), the parameter has \(700,\)"),
    ],
)
def test_state_of_another_size_never_reaches_a_kernel(key: str, value: Any, message: str, lab: Any) -> None:
    params = lab.make_params([(700,)])
    optimizer = zoptim.AdamW(params, state_dtype="8bit")
    lab.run(optimizer, params, range(2), [(700,)])
    optimizer.state[params[0]][key] = value
    before = params[0].detach().clone()
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert torch.equal(params[0].detach(), before)


# Parts ------------------------------------------------------------------------------------------------


def test_the_batches_of_a_plan_share_path_and_dtypes_and_keep_their_order() -> None:
    def entry(numel: int, dtype: torch.dtype = torch.float32, **state: Any) -> Entry:
        return Entry(torch.ones(numel, dtype=dtype), torch.ones(numel, dtype=dtype), state, 0)

    entries = [entry(3), entry(4, torch.bfloat16), entry(5), entry(6, moment=torch.ones(6)), entry(0)]
    found = [
        (path, [e.param.numel() for e in members]) for path, members in sort_entries(entries, lambda e: Path.KERNEL)
    ]
    assert found == [(Path.KERNEL, [3, 5, 0]), (Path.KERNEL, [4]), (Path.KERNEL, [6])]
    by_path = sort_entries(entries[:3], lambda e: Path.TORCH if e.param.numel() == 5 else Path.KERNEL)
    assert [(path, len(members)) for path, members in by_path] == [
        (Path.KERNEL, 1),
        (Path.KERNEL, 1),
        (Path.TORCH, 1),
    ]


@pytest.mark.parametrize(
    ("param", "grad", "state", "reason"),
    [
        (torch.ones(3), torch.ones(3), {}, None),
        (torch.ones(3, 2).t(), torch.ones(3, 2).t(), {}, None),
        (torch.ones(3), torch.ones(3, dtype=torch.float64), {}, "no kernel for a gradient of torch.float64"),
        (torch.ones(3, dtype=torch.float64), torch.ones(3), {}, "no kernel for a parameter of torch.float64"),
        (torch.ones(3, dtype=torch.uint8), torch.ones(3), {}, "no kernel for a parameter of torch.uint8"),
        (torch.ones(6)[::2], torch.ones(3), {}, "do not lie densely"),
        (torch.ones(3), torch.ones(3), {"m": torch.ones(3, device="meta")}, "its state m is on meta"),
    ],
)
def test_the_torch_path_has_a_reason(param: Tensor, grad: Tensor, state: Any, reason: str | None) -> None:
    found = why_no_kernel(Entry(param, grad, state, 0), lambda device: None)
    assert found is None if reason is None else reason in str(found)


def test_a_device_without_kernels_is_the_first_reason() -> None:
    entry = Entry(torch.ones(3, device="meta"), torch.ones(3, device="meta"), {}, 0)
    assert why_no_kernel(entry, lambda device: f"nothing for {device}") == "nothing for meta"


def test_a_part_of_an_entry_shows_the_memory_of_the_whole() -> None:
    state = {"step": torch.zeros(()), "m": torch.arange(1000.0), "m_scale": torch.arange(4.0)}
    whole = Entry(torch.arange(1000.0), torch.ones(1000), state, 7, torch.ones(1000, dtype=torch.bfloat16))
    part = whole.at(slice(256, 700), 3)
    assert (part.index, part.part.tensor, part.part.row) == (7, 3, slice(256, 700))  # type: ignore[union-attr]
    assert (part.param[0], part.param.numel(), part.copy.numel()) == (256.0, 444, 444)  # type: ignore[union-attr]
    assert part.state["step"] is state["step"]
    assert part.state["m_scale"].tolist() == [1.0, 2.0]
    part.state["m"].zero_()
    assert state["m"][255:257].tolist() == [255.0, 0.0]


def test_a_tensor_is_copied_only_when_its_layout_differs() -> None:
    like = torch.ones(2, 3)
    assert in_layout_of(like, like) is like
    turned = torch.arange(6.0).view(3, 2).t()
    laid = in_layout_of(turned, like)
    assert (laid.stride(), torch.equal(laid, turned)) == (like.stride(), True)
    one = torch.ones(3, 1)
    assert in_layout_of(one.t().contiguous().t(), one).stride() in {(1, 1), (1, 3)}


def test_dense_means_without_holes_in_any_order() -> None:
    assert [is_dense(t) for t in (torch.ones(2, 3).t(), torch.ones(4)[::2], torch.ones(()), torch.ones(0))] == [
        True, False, True, True
    ]  # fmt: skip


def test_kinds_tell_apart_everything_but_the_address() -> None:
    grad = torch.ones(2, 3)
    assert kinds_of([grad, None]) == kinds_of([grad.clone(), None])
    for other in ([None, grad], [grad.double(), None], [torch.ones(3, 2), None], [torch.ones(3, 2).t(), None],
                  [grad.to("meta"), None], [grad.to_sparse(), None], [None, None]):  # fmt: skip
        assert kinds_of([grad, None]) != kinds_of(other)
    assert same_objects([grad], [grad])
    assert not same_objects([grad], [grad.clone()])
    assert not same_objects([grad], [])
