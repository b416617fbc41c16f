"""Every optimizer of the contract table follows its rule, torch, and itself on flat shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.mark.filterwarnings("ignore:.* with plain torch operations, which are slower")
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
    options = {**row.options, "weight_decay": 0.0, "lr": row.pace}
    param = torch.full((33,), 2.0, requires_grad=True)
    optimizer = row.ours([param], **options, **path)
    for _ in range(200):
        optimizer.zero_grad()
        (sign * (param - 1) ** 2).sum().backward()
        optimizer.step()
    assert (param - 1).abs().max() < 0.1


ALIGNED = [(64,), (5, 16), (2, 8), (32,)]  # multiples of 16 elements
BLOCKS = [(256,), (3, 256), (512,), (2, 128)]  # multiples of what shares a scale of 8-bit states
CUTS = [0, 1, 64, 77, 200, 201]  # anywhere


def run_flat(optimizer: Any, shards: list[torch.Tensor], shapes: Any, cuts: list[int], lab: Any) -> None:
    """Six steps on flat shards that begin at `cuts`."""
    for step in range(6):
        flat = torch.cat([grad.flatten() for grad in lab.make_grads(step, shapes)])
        for shard, grad in zip(shards, flat.tensor_split(cuts[1:])):
            shard.grad = grad.to(shard.dtype)
        optimizer.step()


def flat_and_whole(
    row: Any, shapes: Any, cuts: list[int], lab: Any, dtype: torch.dtype = torch.float32, **more: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Weights and states after six steps: on flat shards that begin at `cuts`, and on whole tensors."""
    whole = lab.make_params(shapes, dtype)
    flat = torch.cat([param.detach().flatten() for param in whole])
    shards = [shard.clone().requires_grad_() for shard in flat.tensor_split(cuts[1:])]
    cut, uncut = row.make(shards, **more), row.make(whole, **more)
    run_flat(cut, shards, shapes, cuts, lab)
    lab.run(uncut, whole, range(6), shapes)
    return joined(cut, shards), joined(uncut, whole)


def joined(optimizer: Any, params: list[torch.Tensor]) -> list[torch.Tensor]:
    """The weights, and each state, concatenated."""
    keys = [key for key in optimizer.state[params[0]] if key != "step"]
    lines = [
        [param.detach() for param in params],
        *([optimizer.state[param][key] for param in params] for key in keys),
    ]
    return [torch.cat([tensor.flatten() for tensor in line]) for line in lines]


@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_flat_shards_equal_whole_tensors_bit_for_bit(elementwise: Any, path: Any, num_shards: int, lab: Any) -> None:
    cuts = list(range(0, 192, 192 // num_shards))
    lab.assert_bitwise(*flat_and_whole(elementwise, ALIGNED, cuts, lab, **path))


@pytest.mark.parametrize(
    ("dtype", "more"),
    [
        (torch.float32, {}),
        (torch.float32, {"state_dtype": "bf16"}),
        (torch.bfloat16, {}),
        (torch.bfloat16, {"state_dtype": "fp32"}),
        (torch.bfloat16, {"split_master": True}),
        (torch.bfloat16, {"split_master": True, "state_dtype": "bf16"}),
        (torch.float16, {}),
    ],
    ids=["fp32", "bf16 states", "all bf16", "bf16 weights", "split", "split bf16", "fp16"],
)
def test_flat_shards_cut_anywhere_equal_whole_tensors_bit_for_bit(
    elementwise: Any, dtype: torch.dtype, more: dict[str, Any], lab: Any
) -> None:
    lab.assert_bitwise(*flat_and_whole(elementwise, lab.shapes, CUTS, lab, dtype, **more))


def test_flat_shards_cut_anywhere_equal_whole_tensors_to_rounding_without_kernels(elementwise: Any, lab: Any) -> None:
    flat, whole = flat_and_whole(elementwise, lab.shapes, CUTS, lab, foreach=True)
    lab.assert_near(flat, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("more", [{}, {"split_master": True}], ids=["fp32", "split"])
@pytest.mark.parametrize("cuts", [[0], [0, 256], [0, 768, 1024, 1536]], ids=["one", "two", "four"])
def test_shards_with_8bit_states_equal_whole_tensors_when_cut_between_blocks(
    elementwise: Any, cuts: list[int], more: dict[str, Any], lab: Any
) -> None:
    dtype = torch.bfloat16 if more else torch.float32
    lab.assert_bitwise(*flat_and_whole(elementwise, BLOCKS, cuts, lab, dtype, state_dtype="8bit", **more))
