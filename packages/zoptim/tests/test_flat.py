"""Every optimizer of the contract table follows its rule, torch, and itself on flat shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-11), (torch.float32, 2e-5)])
def test_twenty_steps_follow_the_pure_rule_in_float64(
    row: Any, path: Any, dtype: torch.dtype, rtol: float, lab: Any
) -> None:
    params = lab.make_params(dtype=dtype)
    expected = [param.detach().double().clone() for param in params]
    memory: list[Any] = [None] * len(expected)
    lab.run(row.make(params, **path), params, range(20))
    for step in range(20):
        for i, grad in enumerate(lab.make_grads(step)):
            expected[i], memory[i] = row.rule(expected[i], grad.double(), memory[i])
    lab.assert_near(params, expected, rtol=rtol, atol=rtol)


def test_twenty_steps_follow_torch(row: Any, path: Any, lab: Any) -> None:
    ours, theirs = lab.make_params(), lab.make_params()
    lab.run(row.make(ours, **path), ours, range(20))
    lab.run(row.make_torch(theirs), theirs, range(20))
    lab.assert_near(ours, theirs, rtol=1e-5, atol=1e-6)


def test_fused_steps_equal_torch_fused_bit_for_bit(row: Any, lab: Any) -> None:
    ours, theirs = lab.make_params(), lab.make_params()
    lab.run(row.make(ours), ours, range(5))
    lab.run(row.make_torch(theirs, fused=True), theirs, range(5))
    lab.assert_bitwise(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_stay_near_the_rule(row: Any, dtype: torch.dtype, lab: Any) -> None:
    params = lab.make_params(dtype=dtype)
    expected = [param.detach().double().clone() for param in params]
    lab.run(row.make(params), params, range(1))
    for i, grad in enumerate(lab.make_grads(0)):
        expected[i], _ = row.rule(expected[i], grad.to(dtype).double(), None)
    lab.assert_near(params, expected, rtol=2e-2, atol=1e-2)


def test_training_a_quadratic_converges(row: Any, path: Any, lab: Any) -> None:
    sign = -1.0 if row.options.get("maximize") else 1.0
    options = {**row.options, "weight_decay": 0.0, "lr": 0.05}
    param = torch.full((33,), 2.0, requires_grad=True)
    optimizer = row.ours([param], **options, **path)
    for _ in range(200):
        optimizer.zero_grad()
        (sign * (param - 1) ** 2).sum().backward()
        optimizer.step()
    assert (param - 1).abs().max() < 0.1


ALIGNED = [(64,), (5, 16), (2, 8), (32,)]  # multiples of 16 elements


@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_flat_shards_equal_whole_tensors_bit_for_bit(row: Any, path: Any, num_shards: int, lab: Any) -> None:
    whole = lab.make_params(ALIGNED)
    flat = torch.cat([param.detach().flatten() for param in whole])
    shards = [shard.requires_grad_() for shard in flat.clone().chunk(num_shards)]
    optimizers = [row.make([shard], **path) for shard in shards]
    lab.run(row.make(whole, **path), whole, range(6), ALIGNED)
    for step in range(6):
        grads = torch.cat([grad.flatten() for grad in lab.make_grads(step, ALIGNED)]).chunk(num_shards)
        for shard, grad, optimizer in zip(shards, grads, optimizers):
            shard.grad = grad
            optimizer.step()
    lab.assert_bitwise([torch.cat([s.detach() for s in shards])], [torch.cat([p.detach().flatten() for p in whole])])


def test_flat_shards_cut_anywhere_equal_whole_tensors_to_rounding(row: Any, lab: Any) -> None:
    whole = lab.make_params()
    flat = torch.cat([param.detach().flatten() for param in whole]).requires_grad_()
    optimizer = row.make([flat])
    lab.run(row.make(whole), whole, range(6))
    for step in range(6):
        flat.grad = torch.cat([grad.flatten() for grad in lab.make_grads(step)])
        optimizer.step()
    lab.assert_near([flat], [torch.cat([p.detach().flatten() for p in whole])], rtol=1e-5, atol=1e-6)
