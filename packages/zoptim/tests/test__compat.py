"""The assumptions of zoptim about torch's private and functional API.

A failure means that this torch changed something that `zoptim/_compat.py` uses.  Read the release notes, adapt that
file and its header, then this one.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.sgd import sgd

import zoptim
from zoptim import _compat

ADAM_GROUP = {
    "lr": 0.1,
    "betas": (0.9, 0.99),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "amsgrad": False,
    "maximize": False,
    "decoupled_weight_decay": True,
}
SGD_GROUP = {
    "lr": 0.1,
    "momentum": 0.9,
    "dampening": 0.5,
    "weight_decay": 0.0,
    "nesterov": False,
    "maximize": False,
}


def adam_lists(param: Tensor, grad: Tensor, step: float = 0.0) -> _compat.AdamLists:
    zeros = [torch.zeros_like(param) for _ in range(3)]
    return _compat.AdamLists([param], [grad], [zeros[0]], [zeros[1]], [zeros[2]], [torch.tensor(step)])


@pytest.mark.parametrize("name", ["_foreach_div", "_foreach_div_"])
def test_foreach_division_takes_one_tensor_for_all(name: str) -> None:
    assert "Tensor" in getattr(torch.ops.aten, name).overloads()


def test_the_kernels_ask_torch_whether_a_tensor_has_holes() -> None:
    is_dense = torch.ops.aten.is_non_overlapping_and_dense.default
    cases = [
        torch.ones(6),
        torch.ones(2, 3).t(),
        torch.ones(6)[::2],
        torch.ones(()),
        torch.ones(0),
        torch.ones(1).expand(3),
    ]
    assert [bool(is_dense(case)) for case in cases] == [True, True, False, True, True, False]


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (adam, "foreach fused amsgrad beta1 beta2 lr weight_decay eps maximize"),
        (adamw, "foreach fused amsgrad beta1 beta2 lr weight_decay eps maximize"),
        (sgd, "foreach fused weight_decay momentum lr dampening nesterov maximize"),
    ],
    ids=["adam", "adamw", "sgd"],
)
def test_the_functional_optimizers_take_the_arguments_that_we_pass(function: Any, wanted: str) -> None:
    assert set(wanted.split()) <= set(inspect.signature(function).parameters)


@pytest.mark.parametrize(
    ("function", "first"),
    [
        (adam, "params grads exp_avgs exp_avg_sqs max_exp_avg_sqs state_steps"),
        (adamw, "params grads exp_avgs exp_avg_sqs max_exp_avg_sqs state_steps"),
        (sgd, "params d_p_list momentum_buffer_list"),
    ],
    ids=["adam", "adamw", "sgd"],
)
def test_their_lists_come_in_the_order_in_which_we_pass_them(function: Any, first: str) -> None:
    assert list(inspect.signature(function).parameters)[: len(first.split())] == first.split()


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("amsgrad", [True, False])
def test_foreach_adam_updates_everything_in_place_and_counts_the_step(decoupled: bool, amsgrad: bool) -> None:
    lists = adam_lists(torch.ones(3), torch.full((3,), 2.0))
    group = {**ADAM_GROUP, "decoupled_weight_decay": decoupled, "amsgrad": amsgrad, "weight_decay": 0.5}
    _compat.foreach_adam(group, lists)
    assert lists.steps[0].item() == 1.0
    torch.testing.assert_close(lists.exp_avgs[0], torch.full((3,), 0.2 if decoupled else 0.25))
    torch.testing.assert_close(lists.params[0], torch.full((3,), 0.95 - 0.1 if decoupled else 0.9))
    assert lists.max_exp_avg_sqs[0].any() == amsgrad


def test_an_infinite_step_makes_both_bias_corrections_one() -> None:
    lists = adam_lists(torch.ones(4), torch.full((4,), 2.0), step=float("inf"))
    _compat.foreach_adam(ADAM_GROUP, lists)
    expected = 1 - 0.1 * (0.1 * 2) / ((0.01 * 4) ** 0.5 + 1e-8)
    torch.testing.assert_close(lists.params[0], torch.full((4,), expected))


def test_foreach_sgd_returns_new_buffers_first_and_the_same_ones_then() -> None:
    params, grads = [torch.ones(3), torch.ones(2)], [torch.ones(3), torch.ones(2)]
    made = _compat.foreach_sgd(SGD_GROUP, _compat.SgdLists(params, grads, [], first=True))
    assert [buffer.tolist() for buffer in made] == [[1.0] * 3, [1.0] * 2]
    again = _compat.foreach_sgd(SGD_GROUP, _compat.SgdLists(params, grads, made))
    assert all(new is old for new, old in zip(again, made))
    assert made[0].tolist() == pytest.approx([1.4] * 3)
    assert _compat.foreach_sgd({**SGD_GROUP, "momentum": 0.0}, _compat.SgdLists(params, grads, [])) == []


def test_the_first_momentum_does_not_share_memory_with_the_gradient() -> None:
    grad = torch.ones(3)
    (made,) = _compat.foreach_sgd(SGD_GROUP, _compat.SgdLists([torch.ones(3)], [grad], [], first=True))
    assert made.data_ptr() != grad.data_ptr()


def test_divide_works_in_place_on_mixed_dtypes_and_on_nothing() -> None:
    tensors = [torch.full((3,), 6.0), torch.full((2,), 6.0, dtype=torch.bfloat16), torch.ones(0)]
    _compat.divide_(tensors, torch.tensor(2.0))
    assert [tensor.tolist() for tensor in tensors] == [[3.0] * 3, [3.0] * 2, []]
    assert tensors[1].dtype is torch.bfloat16
    _compat.divide_([], torch.tensor(2.0))


def test_divided_leaves_the_gradients_as_they_were() -> None:
    tensors = [torch.full((3,), 6.0), torch.full((2,), 6.0, dtype=torch.bfloat16), torch.ones(0)]
    quotients = _compat.divide(tensors, torch.tensor(2.0))
    assert [tensor.tolist() for tensor in quotients] == [[3.0] * 3, [3.0] * 2, []]
    assert [tensor.dtype for tensor in quotients] == [tensor.dtype for tensor in tensors]
    assert tensors[0].tolist() == [6.0] * 3


def test_divided_by_nothing_is_the_same_tensors() -> None:
    tensors = [torch.ones(3)]
    assert _compat.divide(tensors, None)[0] is tensors[0]
    assert _compat.divide([], torch.tensor(2.0)) == []


def test_adafactor_accepts_none_for_absent_moments() -> None:
    vector, matrix = torch.ones(4), torch.ones(2, 3)
    lists = _compat.AdafactorLists()
    lists.add(vector, torch.ones(4), {"step": torch.zeros(()), "variance": torch.zeros(4)})
    moments = {"row_var": torch.zeros(2, 1), "col_var": torch.zeros(1, 3)}
    lists.add(matrix, torch.ones(2, 3), {"step": torch.zeros(()), **moments})
    group = {"foreach": None, "d": 1.0, "lr": 0.1, "beta2_decay": -0.8, "weight_decay": 0.0, "eps": (None, 1e-3)}
    _compat.adafactor({**group, "maximize": False}, lists)
    assert [float(step) for step in lists.steps] == [1, 1]
    assert (vector < 1).all()
    assert (matrix < 1).all()
    assert moments["row_var"].all()


def test_an_optimizer_is_built_without_importing_the_compiler() -> None:
    """torch's add_param_group would import torch._dynamo: a second and 65 MB."""
    code = (
        "import sys, torch, zoptim; zoptim.AdamW([torch.nn.Parameter(torch.ones(2))]); "
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_groups_are_added_as_torch_does() -> None:
    ours = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.5)
    _compat.add_param_group(ours, {"params": [torch.ones(3, requires_grad=True)], "lr": 0.1})
    assert [group["lr"] for group in ours.param_groups] == [0.5, 0.1]
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        _compat.add_param_group(ours, {"params": ours.param_groups[0]["params"]})


# Hooks ------------------------------------------------------------------------------------------------


def make_optimizer() -> zoptim.AdamW:
    param = torch.ones(3, requires_grad=True)
    param.grad = torch.ones(3)
    return zoptim.AdamW([param])


def test_hooks_of_an_optimizer_and_of_all_run_once_a_step() -> None:
    seen: list[str] = []
    optimizer = make_optimizer()
    optimizer.step()
    handles = [
        optimizer.register_step_pre_hook(lambda *_: seen.append("before")),
        optimizer.register_step_post_hook(lambda *_: seen.append("after")),
        register_optimizer_step_pre_hook(lambda *_: seen.append("before all")),
        register_optimizer_step_post_hook(lambda *_: seen.append("after all")),
    ]
    for kept in (handles, handles[1:], handles[3:]):
        for handle in set(handles) - set(kept):
            handle.remove()
        optimizer.step()
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert seen == ["before all", "before", "after", "after all", "before all", "after", "after all", "after all"]
    assert optimizer.state[optimizer.param_groups[0]["params"][0]]["step"] == 5


def test_a_profile_names_the_step() -> None:
    optimizer = make_optimizer()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    assert "Optimizer.step#AdamW.step" in {event.key for event in profile.key_averages()}
