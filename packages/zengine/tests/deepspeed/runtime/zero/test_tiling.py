"""TiledLinear equals the whole layer: values, gradients, and at stage 3."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zcomm.testing import run_ranks
from zengine import deepspeed
from zengine.deepspeed.runtime.zero.tiling import TiledLinear, TiledLinearReturnBias, split_tensor_along_last_dim


class ReturnsBias(nn.Linear):
    """Layer in Megatron's style."""

    def forward(self, x):
        return super().forward(x), self.bias


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("ins", "outs"), [(1, 1), (2, 3), (23, 29)])
def test_values_and_gradients_are_those_of_the_whole_layer(ins, outs, bias):
    torch.manual_seed(0)
    whole = nn.Linear(23, 29, bias=bias)
    tiled = TiledLinear(23, 29, bias=bias, in_splits=ins, out_splits=outs, init_linear=whole)
    x = torch.randn(5, 23)
    torch.testing.assert_close(tiled(x), whole(x))
    tiled(x).square().sum().backward()
    whole(x).square().sum().backward()
    for row in range(outs):
        for column in range(ins):
            tile = tiled.linears[row][column]
            part = whole.weight.grad[
                tiled.out_parts[row] : tiled.out_parts[row + 1], tiled.in_parts[column] : tiled.in_parts[column + 1]
            ]
            torch.testing.assert_close(tile.weight.grad, part)
            assert (tile.bias is not None) == (bias and column == ins - 1)


def test_a_bias_that_is_returned_is_joined_and_not_summed():
    torch.manual_seed(0)
    whole = ReturnsBias(6, 5)
    tiled = TiledLinearReturnBias(6, 5, in_splits=2, out_splits=2, linear_cls=ReturnsBias, init_linear=whole)
    x = torch.randn(3, 6)
    output, bias = tiled(x)
    torch.testing.assert_close(output + 0 * bias, whole(x)[0])
    assert torch.equal(bias, whole.bias)
    without = TiledLinearReturnBias(6, 5, bias=False, out_splits=2, linear_cls=ReturnsBias)
    assert without(x)[1] is None


def test_the_input_may_be_split_and_the_outputs_left_apart():
    whole = nn.Linear(6, 5)
    tiled = TiledLinear(
        6, 5, in_splits=2, out_splits=2, input_is_already_split=True, combine_out_splits=False, init_linear=whole
    )
    x = torch.randn(3, 6)
    parts = split_tensor_along_last_dim(x, [3, 3], contiguous_split_chunks=True)
    assert all(part.is_contiguous() for part in parts)
    torch.testing.assert_close(torch.cat(tiled(parts), dim=-1), whole(x))
    with pytest.raises(ValueError, match="the input has 1 parts, and in_splits is 2"):
        tiled([x])


def test_impossible_splits_and_other_shapes_are_refused():
    for ins, outs in ((0, 1), (1, 0), (7, 1), (1, 6)):
        with pytest.raises(RuntimeError, match="it must be from 1 to"):
            TiledLinear(6, 5, in_splits=ins, out_splits=outs)
    with pytest.raises(ValueError, match=r"needs a weight of shape \(5, 6\) with a bias, got \(5, 6\) without one"):
        TiledLinear(6, 5, init_linear=nn.Linear(6, 5, bias=False))


def check_stage_3() -> list[float]:
    torch.manual_seed(1)
    whole = nn.Linear(6, 4)
    with deepspeed.zero.Init():
        tiled = deepspeed.zero.TiledLinear(6, 4, in_splits=2, out_splits=2)
    tiled.copy_params_from(whole)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    engine = deepspeed.initialize(model=tiled, config=config)[0]
    x = torch.ones(2, 6)
    losses = []
    for _ in range(3):
        loss = engine(x).square().mean()
        expected = whole(x).square().mean()
        torch.testing.assert_close(loss, expected)
        engine.backward(loss)
        engine.step()
        whole.zero_grad()
        expected.backward()
        with torch.no_grad():
            for param in whole.parameters():
                param -= 0.1 * param.grad
        losses.append(float(loss))
    engine.destroy()
    return losses


def test_at_stage_3_the_losses_are_those_of_the_whole_layer():
    first, second = run_ranks(check_stage_3, 2)
    assert first == second
    assert first[2] < first[0]
