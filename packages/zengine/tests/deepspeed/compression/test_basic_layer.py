"""Layers that are compressed by hand, against the same layers with weights rounded and pruned before."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from zcomm.testing import run_ranks
from zengine.deepspeed.compression.basic_layer import (
    BNLayer_Compress,
    ColumnParallelLinear_Compress,
    Conv2dLayer_Compress,
    Embedding_Compress,
    LinearLayer_Compress,
    RowParallelLinear_Compress,
)
from zprecision.quant import round_to_bits


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(3)


def linear(out: int = 6, bias: bool = True) -> Any:
    return LinearLayer_Compress(8, out, bias=bias)


X = torch.linspace(-1, 1, 24).view(3, 8)


def test_without_a_technique_they_are_plain_layers() -> None:
    layer = linear()
    assert isinstance(layer, LinearLayer_Compress)
    assert isinstance(layer, nn.Linear)
    assert not isinstance(nn.Linear(2, 2), LinearLayer_Compress)
    assert torch.equal(layer(X), nn.functional.linear(X, layer.weight, layer.bias))
    product, bias = layer(X, skip_bias_add=True)
    assert torch.equal(product, nn.functional.linear(X, layer.weight))
    assert bias is layer.bias


@pytest.mark.parametrize(("bits", "kind"), [(8, "symmetric"), (4, "asymmetric"), (2, "symmetric"), (1, "symmetric")])
def test_weights_are_rounded_while_it_is_switched_on_and_then_fixed(bits: int, kind: Any) -> None:
    layer = linear()
    layer.enable_weight_quantization(12, bits, 7, True, kind, 2)
    assert (layer.weight.start_bits, layer.weight.target_bits, layer.weight.q_period) == (12, bits, 7)
    plain, rounded = layer.weight.detach().clone(), round_to_bits(layer.weight.detach(), bits, groups=2, kind=kind)
    assert torch.equal(layer(X), nn.functional.linear(X, plain, layer.bias))
    layer.weight_quantization_enabled = True
    out = layer(X)
    assert torch.equal(out, nn.functional.linear(X, rounded, layer.bias))
    out.sum().backward()
    assert torch.equal(layer.weight.grad, X.sum(0).expand(6, 8)), "the gradient passes straight through"
    layer.fix_weight_quantization()
    assert torch.equal(layer.weight.detach(), rounded)
    assert torch.equal(layer(X), out)
    assert not layer.weight_quantization_enabled_in_forward


def test_outside_of_forward_the_weight_only_gets_its_bits() -> None:
    layer = linear()
    layer.enable_weight_quantization(8, 4, 10, False, "symmetric", 1)
    layer.weight_quantization_enabled = True
    assert layer.weight.start_bits == 8
    assert torch.equal(layer(X), nn.functional.linear(X, layer.weight, layer.bias))


def test_rows_of_an_embedding_have_a_scale_each() -> None:
    layer: Any = Embedding_Compress(5, 4)
    layer.enable_weight_quantization(8, 4, 1, True, "symmetric", 1)
    layer.weight_quantization_enabled = True
    rounded = round_to_bits(layer.weight.detach(), 4, groups=5)
    assert torch.equal(layer(torch.arange(5)), rounded)


@pytest.mark.parametrize("calibration", ["dynamic", "static"])
def test_inputs_are_rounded(calibration: str) -> None:
    layer = linear()
    layer.enable_activation_quantization(4, "symmetric", calibration)
    assert torch.equal(layer(X), nn.functional.linear(X, layer.weight, layer.bias))
    layer.activation_quantization_enabled = True
    rounded = round_to_bits(X, 4, groups=3 if calibration == "dynamic" else 1)
    assert torch.allclose(layer(X), nn.functional.linear(rounded, layer.weight, layer.bias), atol=1e-6)


@pytest.mark.parametrize("method", ["l1", "topk"])
def test_sparse_pruning_keeps_a_share_of_the_weights(method: str) -> None:
    layer = linear()
    layer.enable_sparse_pruning(0.25, method)
    layer.sparse_pruning_enabled = True
    mask = layer.get_mask("sparse").bool()
    assert int(mask.sum()) == 12
    assert [name for name, _ in layer.named_parameters() if "scores" in name] == (
        ["sparse_mask_scores"] if method == "topk" else []
    )
    wanted = nn.functional.linear(X, layer.weight * mask, layer.bias)
    assert torch.equal(layer(X), wanted)
    layer.fix_sparse_pruning_helper()
    assert torch.equal(layer(X), wanted)
    assert int(layer.weight.count_nonzero()) == 12
    assert set(layer.state_dict()) == {"weight", "bias"}


@pytest.mark.parametrize("method", ["l1", "topk"])
def test_rows_shrink_with_the_columns_of_the_next_layer(method: str) -> None:
    first, second = linear(6), LinearLayer_Compress(6, 3)
    first.enable_row_pruning(0.5, method)
    first.row_pruning_enabled = True
    wanted = second(torch.relu(first(X)))
    masked = copy.deepcopy(first)
    masked.fix_row_col_pruning_helper()
    assert torch.equal(second(torch.relu(masked(X))), wanted)
    mask = first.fix_row_col_pruning_helper(dim_reduction=True)
    assert second.fix_row_col_pruning_helper(mask, dim_reduction=True) is None
    assert (first.weight.shape, first.bias.shape, first.out_features) == ((3, 8), (3,), 3)
    assert (second.weight.shape, second.in_features) == ((3, 3), 3)
    assert torch.allclose(second(torch.relu(first(X))), wanted, atol=1e-6)


def test_heads_shrink_with_the_rows_of_query_key_and_value() -> None:
    value, output = linear(8), LinearLayer_Compress(8, 5)
    output.enable_head_pruning(0.5, "topk", 4)
    output.head_pruning_enabled = True
    wanted = output(value(X))
    mask = output.fix_head_pruning_helper(num_heads=4, dim_reduction=True)
    value.fix_head_pruning_helper(mask, num_heads=4, dim_reduction=True)
    assert (tuple(output.weight.shape), tuple(value.weight.shape)) == ((5, 4), (4, 8))
    assert torch.allclose(output(value(X)), wanted, atol=1e-6)
    with pytest.raises(ValueError, match="heads are pruned by learned scores; pass 'topk'"):
        output.enable_head_pruning(0.5, "l1", 4)


def test_channels_shrink_with_their_norm_and_the_next_convolution() -> None:
    first, norm, second = Conv2dLayer_Compress(2, 4, 3), BNLayer_Compress(4), Conv2dLayer_Compress(4, 2, 1)
    x = torch.randn(2, 2, 5, 5)
    first.enable_channel_pruning(0.5, "l1")
    first.enable_weight_quantization(8, 4, 1, True, "symmetric", 1)
    first.channel_pruning_enabled = first.weight_quantization_enabled = True
    norm.eval()
    mask = first.get_mask("channel").view(1, 4, 1, 1)
    wanted = second(torch.relu(norm(first(x)) * mask))
    first.fix_weight_quantization()
    kept = first.fix_channel_pruning_helper(dim_reduction=True)
    assert kept is not None
    norm.fix_channel_pruning_helper(kept)
    second.fix_channel_pruning_helper(kept, dim_reduction=True)
    assert tuple(first.weight.shape) == (2, 2, 3, 3)
    assert torch.allclose(second(torch.relu(norm(first(x)))), wanted, atol=1e-6)


def test_a_copy_has_techniques_of_its_own() -> None:
    layer = linear()
    layer.enable_sparse_pruning(0.5, "topk")
    layer.sparse_pruning_enabled = True
    other = copy.deepcopy(layer)
    layer.fix_sparse_pruning_helper()
    assert torch.equal(other(X), layer(X))
    assert "sparse_mask_scores" in other.state_dict()


def test_mistakes_are_named() -> None:
    layer = linear()
    for call, text in (
        (lambda: layer.get_mask("row"), "row pruning of this LinearLayer_Compress is not enabled"),
        (layer.fix_weight_quantization, "call enable_weight_quantization"),
        (lambda: layer.enable_sparse_pruning(0.5, "snip"), "method = 'snip': pass 'l1' or 'topk'"),
        (lambda: layer.enable_activation_quantization(5, "symmetric", "dynamic"), "bits = 5 must be 4 or 8"),
        (lambda: layer.enable_weight_quantization(8, 4, 1, True, "log", 1), "quantization_type = 'log'"),
        (lambda: layer.enable_weight_quantization(8, 4, 1, True, "symmetric", 7), "must divide the 48 elements"),
        (lambda: layer.enable_weight_quantization(8, 2, 1, True, "asymmetric", 1), "symmetric"),
    ):
        with pytest.raises(ValueError, match=text):
            call()


class Mpu:
    def get_model_parallel_group(self) -> Any:
        return torch.distributed.group.WORLD


def _parallel() -> list[torch.Tensor]:
    """Outputs and the input's gradient of two layers that are split over the ranks, each rounded."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(3)
    first, second = nn.Linear(8, 12), nn.Linear(12, 4)
    up = ColumnParallelLinear_Compress(Mpu(), 8, 12, gather_output=False)
    down = RowParallelLinear_Compress(Mpu(), 12, 4, input_is_parallel=True)
    rows = slice(rank * 12 // size, (rank + 1) * 12 // size)
    with torch.no_grad():
        up.weight.copy_(first.weight[rows])
        up.bias.copy_(first.bias[rows])
        down.weight.copy_(second.weight[:, rows])
        down.bias.copy_(second.bias)
    x = X.clone().requires_grad_()
    for layer, groups in ((up, up.out_features), (down, 1)):
        layer.enable_weight_quantization(8, 8, 1, True, "symmetric", groups)
    up.weight_quantization_enabled = True  # a scale for each row, so parts are rounded as the whole is
    y, bias = down(torch.relu(up(x)[0]))
    assert bias is None
    y.square().sum().backward()
    whole, _ = ColumnParallelLinear_Compress(Mpu(), 8, 12, skip_bias_add=True)(X)
    again, _ = RowParallelLinear_Compress(Mpu(), 8, 4)(X)
    assert (whole.shape, again.shape) == ((3, 12), (3, 4))
    return [y.detach(), x.grad]


def test_layers_of_model_parallel_ranks_compute_what_one_rank_does() -> None:
    (alone,) = run_ranks(_parallel, 1)
    for found in run_ranks(_parallel, 2):
        for each, wanted in zip(found, alone, strict=True):
            assert torch.allclose(each, wanted, atol=1e-6)
