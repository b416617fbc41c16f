"""What zoptim relies on in torch's private and functional API.

A failure here means: this torch has changed something that `zoptim/_compat.py` builds on.  Read the release
notes, adapt that file and its header, then this one.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from zoptim import _compat

ADAM_SCHEMA = (
    "Tensor(a!)[] self, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, Tensor(d!)[] exp_avg_sqs, "
    "Tensor(e!)[] max_exp_avg_sqs, Tensor[] state_steps, *, {lr} lr, float beta1, float beta2, float weight_decay, "
    "float eps, bool amsgrad, bool maximize, Tensor? grad_scale=None, Tensor? found_inf=None) -> ()"
)
SGD_SCHEMA = (
    "Tensor(a!)[] self, Tensor(b!)[] grads, Tensor(c!)[] momentum_buffer_list, *, float weight_decay, "
    "float momentum, {lr} lr, float dampening, bool nesterov, bool maximize, bool is_first_step, "
    "Tensor? grad_scale=None, Tensor? found_inf=None) -> ()"
)
ADAM_GROUP = {
    "lr": 0.1,
    "betas": (0.9, 0.99),
    "eps": 1e-8,
    "weight_decay": 0.01,
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


def adam_lists(param: Tensor, grad: Tensor, step: float = 1.0) -> _compat.AdamLists:
    zeros = [torch.zeros_like(param) for _ in range(2)]
    return _compat.AdamLists([param], [grad], [zeros[0]], [zeros[1]], [], [torch.tensor(step)])


@pytest.mark.parametrize("overload", ["default", "tensor_lr"])
@pytest.mark.parametrize(
    ("name", "schema"), [("_fused_adam_", ADAM_SCHEMA), ("_fused_adamw_", ADAM_SCHEMA), ("_fused_sgd_", SGD_SCHEMA)]
)
def test_the_fused_kernels_have_the_signature_that_we_call(name: str, schema: str, overload: str) -> None:
    found = str(getattr(getattr(torch.ops.aten, name), overload)._schema)
    suffix, lr = ("", "float") if overload == "default" else (".tensor_lr", "Tensor")
    assert found == f"aten::{name}{suffix}({schema.format(lr=lr)}"


@pytest.mark.parametrize("name", ["_foreach_div_", "_foreach_add_"])
def test_foreach_calls_take_one_tensor_for_all(name: str) -> None:
    assert "Tensor" in getattr(torch.ops.aten, name).overloads()


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_fused_kernel_stores_the_divided_gradient(dtype: torch.dtype) -> None:
    grad = torch.arange(37).to(dtype)
    signals = _compat.Signals(grad_scale=torch.tensor(8.0))
    _compat.fused_adam(ADAM_GROUP, adam_lists(torch.ones_like(grad), grad), signals)
    assert torch.equal(grad, torch.arange(37).to(dtype) / 8)


def test_a_fused_kernel_skips_on_exactly_one_and_then_writes_nothing() -> None:
    lists = adam_lists(torch.ones(37), torch.ones(37))
    signals = _compat.Signals(torch.tensor(8.0), torch.tensor(1.0))
    _compat.fused_adam(ADAM_GROUP, lists, signals)
    assert torch.equal(lists.params[0], torch.ones(37))
    assert torch.equal(lists.grads[0], torch.ones(37))
    assert torch.equal(lists.exp_avgs[0], torch.zeros(37))
    _compat.fused_adam(ADAM_GROUP, lists, _compat.Signals(found_inf=torch.tensor(2.0)))
    assert not torch.equal(lists.params[0], torch.ones(37)), "2.0 skips too now: read_signals may be simplified"


def test_a_fused_kernel_leaves_the_step_count_to_the_caller() -> None:
    lists = adam_lists(torch.ones(4), torch.ones(4), step=3.0)
    _compat.fused_adam(ADAM_GROUP, lists, _compat.Signals())
    assert lists.steps[0].item() == 3.0


@pytest.mark.parametrize("update", [_compat.foreach_adam, lambda g, ls: _compat.fused_adam(g, ls, _compat.Signals())])
def test_an_infinite_step_makes_both_bias_corrections_one(update: Any) -> None:
    lists = adam_lists(torch.ones(4), torch.full((4,), 2.0), step=float("inf"))
    update({**ADAM_GROUP, "weight_decay": 0.0}, lists)
    expected = 1 - 0.1 * (0.1 * 2) / ((0.01 * 4) ** 0.5 + 1e-8)
    torch.testing.assert_close(lists.params[0], torch.full((4,), expected))


def test_the_cpu_kernels_ignore_strides_which_is_why_batches_are_sorted_by_layout() -> None:
    grad = torch.tensor([[1.0, -1.0], [1.0, -1.0]])
    param = torch.zeros(2, 2).t()
    _compat.fused_adam({**ADAM_GROUP, "weight_decay": 0.0}, adam_lists(param, grad), _compat.Signals())
    assert not torch.equal(param.sign(), -grad.sign()), "strides are respected now: path_of may be simplified"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_sgd_on_cpus_is_wrong_in_low_precision_and_avoided(dtype: torch.dtype) -> None:
    param = torch.ones(64, dtype=dtype)
    assert not _compat.has_fused_kernel(param, _compat.FUSED_SGD_ON)
    lists = _compat.SgdLists([param], [torch.full_like(param, 4.0)], [])
    _compat.fused_sgd({**SGD_GROUP, "momentum": 0.0, "dampening": 0.0}, lists, _compat.Signals())
    assert torch.equal(param, torch.ones_like(param)), "torch has mended it: add the dtypes to FUSED_SGD_ON"


def test_the_first_fused_momentum_is_the_gradient_undampened() -> None:
    lists = _compat.SgdLists([torch.ones(37)], [torch.full((37,), 3.0)], [torch.full((37,), 7.0)], first=True)
    _compat.fused_sgd(SGD_GROUP, lists, _compat.Signals())
    assert torch.equal(lists.buffers[0], torch.full((37,), 3.0))


def test_foreach_sgd_returns_new_buffers_first_and_the_same_ones_then() -> None:
    params, grads = [torch.ones(3), torch.ones(2)], [torch.ones(3), torch.ones(2)]
    made = _compat.foreach_sgd(SGD_GROUP, _compat.SgdLists(params, grads, [], first=True))
    assert [buffer.tolist() for buffer in made] == [[1.0] * 3, [1.0] * 2]
    again = _compat.foreach_sgd(SGD_GROUP, _compat.SgdLists(params, grads, made))
    assert all(new is old for new, old in zip(again, made))
    assert _compat.foreach_sgd({**SGD_GROUP, "momentum": 0.0}, _compat.SgdLists(params, grads, [])) == []


def test_divide_and_add_work_in_place_on_mixed_dtypes_and_on_nothing() -> None:
    tensors = [torch.full((3,), 6.0), torch.full((2,), 6.0, dtype=torch.bfloat16), torch.ones(0)]
    _compat.divide_(tensors, torch.tensor(2.0))
    _compat.add_(tensors, torch.tensor(1.0))
    assert [tensor.tolist() for tensor in tensors] == [[4.0] * 3, [4.0] * 2, []]
    assert tensors[1].dtype is torch.bfloat16
    _compat.divide_([], torch.tensor(2.0))


def test_where_fused_kernels_are_used() -> None:
    assert _compat.has_fused_kernel(torch.ones(1, dtype=torch.float16), _compat.FUSED_ADAM_ON)
    assert not _compat.has_fused_kernel(torch.ones(1, dtype=torch.int32), _compat.FUSED_ADAM_ON)
    assert not _compat.has_fused_kernel(torch.ones(1, device="meta"), _compat.FUSED_ADAM_ON)
