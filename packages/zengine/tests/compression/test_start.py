"""init_compression: which layers it changes, what stays as it was, and what it refuses."""

from __future__ import annotations

import copy
import io
import logging
from typing import Any

import pytest
import torch
from compressed_models import Decoder, Pictures, config, group, technique, tokens, weights
from torch import nn

import zengine
import zprecision
from zengine.compression import compressed_layers
from zengine.compression.layers import StepCount, compress
from zengine.compression.start import compression_of

FOUR = {"start_bits": 8, "target_bits": 4}


def started(model: nn.Module, section: dict[str, Any], steps: int = 0) -> nn.Module:
    """A compressed model after `steps` applied steps."""
    zengine.init_compression(model, config(section))
    found = compression_of(model)
    assert found is not None
    found.count.steps = steps
    return model


def test_names_and_values_stay_and_nothing_is_on_without_an_engine() -> None:
    model, plain = Decoder(), Decoder()
    assert zengine.init_compression(model, config(weights(group(["*"], **FOUR)))) is model
    assert list(model.state_dict()) == list(plain.state_dict())
    assert torch.equal(model(tokens()), plain(tokens()))
    assert len(compressed_layers(model)) == 14


@pytest.mark.parametrize("offset", [0, 3])
def test_a_technique_is_on_from_its_offset(offset: int) -> None:
    model, plain = started(Decoder(), weights(group(["up"], **FOUR), schedule_offset=offset), offset - 1), Decoder()
    assert torch.equal(model(tokens()), plain(tokens()))
    compression_of(model).count.steps = offset
    for block in plain.layers:
        block.up.weight.data = zprecision.quant.round_to_bits(block.up.weight, 4)
    assert torch.equal(model(tokens()), plain(tokens()))


def test_embeddings_have_a_scale_a_row_and_groups_are_of_the_weight() -> None:
    model = started(Decoder(), weights(group(["embed", "head"], **FOUR), quantize_groups=2))
    layers = compressed_layers(model)
    round_to_bits = zprecision.quant.round_to_bits
    assert torch.equal(layers["embed"].effective()[0], round_to_bits(model.embed.weight, 4, groups=12))
    assert torch.equal(layers["head"].effective()[0], round_to_bits(model.head.weight, 4, groups=2))


@pytest.mark.parametrize("name", ["int4-row", "int8", "int4-g64-minmax"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_format_has_the_bits_that_inference_loads(name: str, dtype: torch.dtype) -> None:
    from zengine.inference.quantized_modules import quantize_linears

    model = started(Decoder(width=64).to(dtype), weights(group(["*"], format=name)))
    served = Decoder(width=64).to(dtype)
    quantize_linears(served, lambda _: zprecision.format_named(name))
    for path, layer in compressed_layers(model).items():
        if path != "embed":
            assert torch.equal(layer.effective()[0], zprecision.dequantize(served.get_submodule(path).weight, dtype))


def test_every_layer_that_reads_its_weight_is_compressed() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, 2 * self.weight, self.bias)

    model = nn.Sequential(Scaled(4, 4))
    expected = copy.deepcopy(model)
    expected[0].weight.data = zprecision.quant.round_to_bits(expected[0].weight, 4)
    started(model, weights(group(["*"], **FOUR)))
    x = torch.ones(2, 4)
    assert torch.equal(model(x), expected(x))
    assert "weight" not in vars(model[0])


def test_several_techniques_act_one_after_the_other() -> None:
    section = {
        **weights(group(["up"], **FOUR)),
        "row_pruning": technique({}, group(["up"], dense_ratio=0.5)),
        "sparse_pruning": technique({}, group(["up"], dense_ratio=0.25)),
        "activation_quantization": technique({}, group(["up"], bits=8)),
    }
    model = started(nn.ModuleDict({"up": nn.Linear(8, 6)}), section)
    layer = compressed_layers(model)["up"]
    assert [each.name for each in layer.techniques] == [
        *("weight_quantization", "sparse_pruning", "row_pruning", "activation_quantization")
    ]
    plain = layer.layer.weight
    rounded = zprecision.quant.round_to_bits(plain, 4)
    expected = rounded * layer.layer.sparse_pruning_mask * layer.layer.row_pruning_mask
    assert torch.equal(layer.effective()[0], expected)


def test_a_convolution_is_rounded_and_pruned() -> None:
    section = {**weights(group(["*"], **FOUR)), "channel_pruning": technique({}, group(["first"], dense_ratio=0.5))}
    model, plain = started(Pictures(), section), Pictures()
    for name in ("first", "second"):
        layer = plain.get_submodule(name)
        layer.weight.data = zprecision.quant.round_to_bits(layer.weight, 4)
    mask = model.first.channel_pruning_mask
    plain.first.weight.data *= mask
    plain.first.bias.data *= mask.view(-1)
    x = torch.randn(2, 3, 6, 6)
    assert torch.equal(model(x), plain(x))


def test_copies_and_pickles_have_their_own_compressed_layers() -> None:
    model = started(Decoder(), weights(group(["*"], **FOUR)))
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for each in (twin, loaded):
        with torch.no_grad():
            each.head.weight.mul_(2)
        assert torch.equal(each(tokens()), 2 * model(tokens()))
        compression_of(each).count.steps = -1
    assert compression_of(model).count.steps == 0


def test_a_second_forward_on_the_instance_is_kept() -> None:
    layer = nn.Linear(4, 4)
    layer.forward = lambda x: 3 * nn.functional.linear(x, layer.weight)
    compress(layer, StepCount())
    assert torch.equal(layer(torch.eye(4)), 3 * layer.weight.t())


def test_layers_that_torch_reads_itself_are_left_out() -> None:
    model = nn.ModuleDict({"block": nn.TransformerEncoderLayer(8, 2), "head": nn.Linear(8, 8)})
    zengine.init_compression(model, config(weights(group(["*"], **FOUR))))
    assert list(compressed_layers(model)) == ["head"]


def test_a_pattern_that_finds_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "zengine"):
        zengine.init_compression(Decoder(), config(weights(group(["nowhere"], **FOUR))))
    assert "'nowhere' of group 'g0' finds no module that it can change, and has no effect" in caplog.text


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            weights(group(["up"], **FOUR), group(["layers.0"], **FOUR)),
            r"'layers.0.up' matches 'layers.0' of weight_quantization.g1, and belongs to weight_quantization.g0",
        ),
        (
            weights(group(["up"], **FOUR), quantize_groups=7),
            r"quantize_groups = 7 must divide the 1024 elements of the weight of 'layers.0.up'",
        ),
        ({"weight_quantization": technique({"quantize_weight_in_forward": True})}, "has no group, so it would"),
        (
            weights(group(["up"], start_bits=8, target_bits=2), quantization_type="asymmetric"),
            "2 bits are symmetric, and quantization_type is 'asymmetric'",
        ),
        (weights(group(["up"], format="int3")), "'int3' names no format"),
        (weights(group(["up"], format="int4", **FOUR)), "the format has its own bits"),
        (
            {"head_pruning": technique({"method": "topk", "num_heads": 5}, group(["out"], dense_ratio=0.5))},
            "num_heads = 5 must divide the 16 inputs of 'layers.0.attention.out'",
        ),
        (
            {"sparse_pruning": technique({"method": "magic"}, group(["out"], dense_ratio=0.5))},
            'must be one of "l1", "topk"',
        ),
        (
            {"sparse_pruning": technique({"method": "snip_momentum"}, group(["out"], dense_ratio=0.5))},
            "it is an algorithm of Intel's neural_compressor",
        ),
        (
            {"sparse_pruning": technique({"block_pattern": "2:4"}, group(["out"], dense_ratio=0.3))},
            "dense_ratio = 0.3, and '2:4' keeps 0.5",
        ),
        (
            {"sparse_pruning": technique({"block_pattern": "2:5"}, group(["head"]))},
            "'2:5' needs rows of a multiple of 5 weights, and 'head' has 16",
        ),
        (
            {"activation_quantization": technique({}, group(["out"], bits=6))},
            "bits = 6: activations are rounded to 4 or 8 bits",
        ),
        ({"row_pruning": technique({}, group(["(up"], dense_ratio=0.5))}, r"'\(up' is no regular expression"),
        (
            {"row_pruning": technique({}, group(["up"], [["down"], ["up"]], dense_ratio=0.5))},
            "there are 2 lists of related modules, and 1 modules",
        ),
        (
            {"row_pruning": technique({}, group(["up"], [["head"]], dense_ratio=0.5))},
            r"finds 2 modules \(layers.0.up, layers.1.up\), and its related module 'head' finds 1 \(head\)",
        ),
    ],
)
def test_mistakes_are_named_and_change_nothing(section: dict[str, Any], message: str) -> None:
    model = Decoder()
    with pytest.raises(ValueError, match=message):
        zengine.init_compression(model, config(section))
    assert not compressed_layers(model)


def test_a_second_call_is_refused() -> None:
    model = started(Decoder(), weights(group(["*"], **FOUR)))
    with pytest.raises(ValueError, match="the model is compressed already"):
        zengine.init_compression(model, config(weights(group(["*"], **FOUR))))
