"""torch.optim's conventions, and errors, for every optimizer of the contract table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zoptim


def test_parameters_without_gradient_are_left_alone(row: Any, path: Any, lab: Any) -> None:
    params = lab.make_params([(4,), (4,)])
    before = params[1].detach().clone()
    optimizer = row.make(params, **path)
    params[0].grad = torch.ones(4)
    optimizer.step()
    assert torch.equal(params[1], before)
    assert params[1] not in optimizer.state
    optimizer.zero_grad()
    optimizer.step()


def test_a_parameter_that_gets_gradients_late_starts_its_own_history(row: Any, path: Any, lab: Any) -> None:
    params, alone = lab.make_params([(4,), (4,)]), lab.make_params([(4,), (4,)])[1:]
    optimizer = row.make(params, **path)
    for step in range(4):
        params[0].grad = torch.ones(4)
        params[1].grad = torch.full((4,), 2.0) if step >= 2 else None
        optimizer.step()
    lone = row.make(alone, **path)
    for _ in range(2):
        alone[0].grad = torch.full((4,), 2.0)
        lone.step()
    lab.assert_bitwise(params[1:], alone)


def test_groups_have_their_own_options_and_can_be_added_later(row: Any, lab: Any) -> None:
    params = lab.make_params([(4,), (4,), (4,)])
    optimizer = row.make([{"params": params[0], "lr": 0.0}, {"params": params[1:2]}])
    optimizer.add_param_group({"params": iter(params[2:]), "lr": 0.0})
    before = [param.detach().clone() for param in params]
    lab.run(optimizer, params, range(1), [(4,)] * 3)
    changed = [not torch.equal(param, old) for param, old in zip(params, before)]
    assert changed == [False, True, False], "lr 0 freezes a group"


def test_options_of_an_added_group_are_checked_before_it_is_added(row: Any, lab: Any) -> None:
    optimizer = row.make(lab.make_params([(4,)]))
    with pytest.raises(ValueError, match=r"lr is -1; it must be a number in \[0, inf\)"):
        optimizer.add_param_group({"params": lab.make_params([(4,)]), "lr": -1})
    assert len(optimizer.param_groups) == 1


def test_an_empty_parameter_list_raises_as_in_torch(row: Any, lab: Any) -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        row.make([])


def test_a_closure_is_evaluated_with_gradients_and_its_loss_returned(row: Any, lab: Any) -> None:
    param = torch.ones(4, requires_grad=True)
    optimizer = row.make([param])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert loss.item() == 4.0
    assert not torch.equal(param.detach(), torch.ones(4))
    assert optimizer.step() is None


def test_a_tensor_lr_means_the_same_as_its_number(row: Any, path: Any, lab: Any) -> None:
    plain, tensor = lab.make_params(), lab.make_params()
    lab.run(row.make(plain, **path), plain, range(3))
    optimizer = row.ours(
        tensor, **{**row.options, "lr": torch.tensor(row.options["lr"], dtype=torch.float64)}, **path
    )
    lab.run(optimizer, tensor, range(3))
    lab.assert_bitwise(tensor, plain)


def test_torch_schedulers_drive_it(row: Any, lab: Any) -> None:
    ours, theirs = lab.make_params(), lab.make_params()
    for params, optimizer in ((ours, row.make(ours)), (theirs, row.make_torch(theirs))):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
        for step in range(5):
            lab.run(optimizer, params, range(step, step + 1))
            scheduler.step()
    lab.assert_near(ours, theirs, rtol=1e-5, atol=1e-6)


def test_step_hooks_run(row: Any, lab: Any) -> None:
    params = lab.make_params([(4,)])
    optimizer = row.make(params)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    lab.run(optimizer, params, range(1), [(4,)])
    assert seen == ["before", "after"]


@pytest.mark.filterwarnings("ignore:.* with plain torch operations, which are slower")
@pytest.mark.parametrize("layout", ["transposed", "strided", "channels last", "gradient in another layout"])
def test_layout_does_not_change_the_update(row: Any, layout: str, lab: Any) -> None:
    base, grad = torch.randn(2, 4, 6, 6), torch.randn(2, 4, 6, 6)
    param = {
        "transposed": base.transpose(0, 3),
        "strided": base[..., ::2],
        "channels last": base.to(memory_format=torch.channels_last),
        "gradient in another layout": base.clone(),
    }[layout].detach()
    grad = grad.transpose(0, 3) if layout == "transposed" else grad[..., ::2] if layout == "strided" else grad
    if layout == "gradient in another layout":
        grad = grad.to(memory_format=torch.channels_last)
    expected, memory = param.double().contiguous(), None
    param.requires_grad_()
    optimizer = row.make([param])
    for _ in range(3):
        param.grad = grad.contiguous() if layout != "gradient in another layout" else grad
        expected, memory = row.rule(expected, grad.double(), memory)
        optimizer.step()
    lab.assert_near([param], [expected], rtol=2e-5, atol=2e-5)


def test_gradients_of_another_dtype_are_converted(row: Any, lab: Any) -> None:
    param = torch.ones(16, requires_grad=True)
    if not hasattr(param, "grad_dtype"):
        pytest.skip("this torch ties the gradient's dtype to the parameter's")
    param.grad_dtype = torch.bfloat16
    param.grad = torch.full((16,), 0.5, dtype=torch.bfloat16)
    expected, _ = row.rule(torch.ones(16), torch.full((16,), 0.5), None)
    row.make([param]).step()
    lab.assert_near([param], [expected], rtol=1e-6, atol=1e-6)


def test_a_sparse_gradient_raises_with_its_name_before_anything_changes(row: Any, lab: Any) -> None:
    if row.make([torch.ones(4, requires_grad=True)]).__class__ is zoptim.Adagrad:
        pytest.skip("Adagrad updates rows; see test_adagrad_rows.py")
    dense, sparse = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
    optimizer = row.make([("dense", dense), ("table.weight", sparse)])
    dense.grad = torch.ones(4)
    sparse.grad = torch.ones(4).to_sparse()
    with pytest.raises(zoptim.UnsupportedTensorError, match=r"parameter 1 of group 0 \('table.weight'\) is sparse"):
        optimizer.step()
    assert torch.equal(dense.detach(), torch.ones(4))


def test_complex_parameters_raise_with_their_names(row: Any, lab: Any) -> None:
    with pytest.raises(zoptim.UnsupportedTensorError, match=r"parameter 0 of group 0 is complex .*view_as_real"):
        row.make([torch.ones(2, dtype=torch.complex64, requires_grad=True)])


def test_fused_true_raises_where_there_is_no_kernel(lab: Any) -> None:
    param = torch.ones(2, dtype=torch.float64, requires_grad=True)
    param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match=r"fused=True, but parameter 0 of group 0 has no kernel: .*float64"):
        zoptim.AdamW([param], fused=True).step()


def test_the_torch_path_warns_once_with_the_reason(lab: Any) -> None:
    params = lab.make_params(dtype=torch.float64)
    optimizer = zoptim.AdamW(params)
    with pytest.warns(UserWarning, match=r"AdamW updates parameter 0 .* plain torch .*no kernel .*float64") as seen:
        lab.run(optimizer, params, range(3))
    assert len(seen) == 1


def test_state_of_another_optimizer_raises(lab: Any) -> None:
    param = torch.ones(4, requires_grad=True)
    sgd, adam = zoptim.SGD([param], momentum=0.9), zoptim.AdamW([param])
    with pytest.raises(ValueError, match=r"loaded group 0 lacks the options betas, eps.* of AdamW"):
        adam.load_state_dict(sgd.state_dict())
    with pytest.raises(ValueError, match="loaded group 0 lacks the options momentum, dampening of SGD"):
        sgd.load_state_dict(adam.state_dict())


def test_it_declares_the_attributes_for_partitioners_and_grad_scaler(row: Any, lab: Any) -> None:
    assert row.ours.elementwise is row.elementwise
    assert row.ours._step_supports_amp_scaling is True
