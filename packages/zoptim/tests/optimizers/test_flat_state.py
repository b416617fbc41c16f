"""State dicts of every optimizer of the contract table."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(row: Any, path: Any, lab: Any) -> None:
    straight, first = lab.make_params(), lab.make_params()
    lab.run(row.make(straight, **path), straight, range(6))
    optimizer = row.make(first, **path)
    lab.run(optimizer, first, range(3))
    resumed = [param.detach().clone().requires_grad_() for param in first]
    restored = row.make(resumed, **path)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    lab.run(restored, resumed, range(3, 6))
    lab.assert_bitwise(resumed, straight)


@pytest.mark.parametrize("to_torch", [True, False], ids=["into torch", "from torch"])
def test_state_moves_between_torch_and_here(row: Any, path: Any, to_torch: bool, lab: Any) -> None:
    def pair(params: list[Tensor]) -> tuple[Any, Any]:
        makers = [lambda: row.make(params, **path), lambda: row.make_torch(params, **path)]
        first, second = makers if to_torch else makers[::-1]
        return first, second

    straight, moved = lab.make_params(), lab.make_params()
    lab.run(pair(straight)[0](), straight, range(6))
    source, target = (make() for make in pair(moved))
    lab.run(source, moved, range(3))
    written = copy.deepcopy(source.state_dict())
    target.load_state_dict(written)
    assert target.param_groups[0]["lr"] == row.options["lr"]
    lab.run(target, moved, range(3, 6))
    lab.assert_near(moved, straight, rtol=1e-5, atol=1e-6)
    assert lab.state_keys(target.state_dict()) == lab.state_keys(written)


def test_a_copy_is_independent_and_steps_alike(row: Any, lab: Any) -> None:
    params = lab.make_params()
    optimizer = row.make(params)
    lab.run(optimizer, params, range(2))
    twin = copy.deepcopy(optimizer)
    twins = twin.param_groups[0]["params"]
    lab.run(optimizer, params, range(2, 4))
    lab.run(twin, twins, range(2, 4))
    lab.assert_bitwise(twins, params)
    assert twins[0] is not params[0]


def test_state_of_another_shape_raises_and_changes_nothing(row: Any, lab: Any) -> None:
    big, small = [torch.ones(8, requires_grad=True)], [torch.ones(4, requires_grad=True)]
    source, target = row.make(big), row.make(small)
    lab.run(source, big, range(1), [(8,)])
    lab.run(target, small, range(1), [(4,)])
    if not source.state[big[0]]:
        pytest.skip("keeps no state")
    before = lab.snapshot(target, small)
    with pytest.raises(ValueError, match=r"parameter 0 of group 0 has shape \(8,\), the parameter has \(4,\)"):
        target.load_state_dict(copy.deepcopy(source.state_dict()))
    lab.assert_bitwise(lab.snapshot(target, small), before)


def test_state_whose_parameter_was_replaced_never_reaches_a_kernel(row: Any, lab: Any) -> None:
    param = torch.ones(4, requires_grad=True)
    optimizer = row.make([param])
    lab.run(optimizer, [param], range(1), [(4,)])
    param.data = torch.ones(9)
    with pytest.raises(
        ValueError, match=r"gradient of parameter 0 of group 0 has shape \(4,\), the parameter has \(9,\)"
    ):
        optimizer.step()
    param.grad = torch.ones(9)
    if optimizer.state[param]:
        with pytest.raises(ValueError, match=r"drop its entry from optimizer\.state"):
            optimizer.step()
        del optimizer.state[param]
    optimizer.step()
