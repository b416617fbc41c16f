"""redundancy_clean: outputs stay, layers are plain again, and dimensions shrink with related modules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from compressed_models import Decoder, Pictures, config, group, technique, tokens, weights
from torch import Tensor, nn

import zengine
from zengine.compression import compressed_layers
from zengine.compression.start import compression_of

FOUR = {"start_bits": 8, "target_bits": 4}
TOPK = {"method": "topk"}


def trained(model: nn.Module, section: dict[str, Any]) -> nn.Module:
    """A compressed model whose techniques are all on, with scores that differ."""
    zengine.init_compression(model, config(section))
    found = compression_of(model)
    assert found is not None
    found.count.steps = 10_000
    return model


def outputs_around_clean(model: nn.Module, section: dict[str, Any], x: Tensor) -> tuple[Tensor, Tensor]:
    trained(model, section).eval()
    before = model(x).detach()
    assert zengine.redundancy_clean(model, config(section)) is model
    return before, model(x).detach()


def test_without_related_modules_outputs_are_equal_bit_for_bit_and_layers_are_plain() -> None:
    section = {
        **weights(group(["query", "embed"], **FOUR), group(["down"], format="int4-row")),
        "sparse_pruning": technique(TOPK, group(["key"], dense_ratio=0.5)),
        "row_pruning": technique({}, group(["up"], dense_ratio=0.25)),
        "head_pruning": technique({**TOPK, "num_heads": 4}, group(["attention.out"], dense_ratio=0.5)),
    }
    model, plain = Decoder(), Decoder()
    before, after = outputs_around_clean(model, section, tokens())
    assert torch.equal(before, after)
    assert not compressed_layers(model)
    assert list(model.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(model.state_dict())
    assert torch.equal(plain(tokens()), after)
    assert int(plain.layers[0].up.weight.any(1).sum()) == 16


@pytest.mark.parametrize("name", ["int4", "int4-g64-amax", "int8"])
def test_cleaned_weights_are_those_that_inference_loads(name: str) -> None:
    """A cleaned weight is quantized once more when it is loaded, which must not change it."""
    from zprecision import dequantize, quantize

    model = trained(Decoder(width=64), weights(group(["up", "down"], format=name)))
    codes = {path: quantize(layer.layer.weight, name) for path, layer in compressed_layers(model).items()}
    zengine.redundancy_clean(model, config(weights(group(["up", "down"], format=name))))
    for path, stored in codes.items():
        weight = model.get_submodule(path).weight
        assert torch.equal(weight, dequantize(stored))
        assert torch.equal(dequantize(quantize(weight, name)), weight)


def test_rows_shrink_with_the_columns_that_read_them() -> None:
    section = {"row_pruning": technique(TOPK, group([r"layers.\d.up"], [[r"layers.\d.down"]], dense_ratio=0.25))}
    model = Decoder()
    before, after = outputs_around_clean(model, section, tokens())
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)
    for block in model.layers:
        assert (block.up.weight.shape, block.up.bias.shape, block.up.out_features) == ((16, 16), (16,), 16)
        assert (block.down.weight.shape, block.down.bias.shape, block.down.in_features) == ((16, 16), (16,), 16)
        assert isinstance(block.down.weight, nn.Parameter)


def test_every_pattern_has_the_masks_of_its_own_modules() -> None:
    section = {
        "row_pruning": technique(
            {}, group([r"0.up", r"1.up"], [[r"layers.0.down"], [r"layers.1.down"]], dense_ratio=0.5)
        )
    }
    before, after = outputs_around_clean(Decoder(), section, tokens())
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)


def test_heads_shrink_in_all_four_projections() -> None:
    related = [[r"attention.query", r"attention.key", r"attention.value"]]
    shared = {**TOPK, "num_heads": 4}
    section = {"head_pruning": technique(shared, group([r"attention.out"], related, dense_ratio=0.5))}
    model = Decoder()
    before, after = outputs_around_clean(model, section, tokens())
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)
    for block in model.layers:
        assert block.attention.out.weight.shape == (16, 8)
        for layer in (block.attention.query, block.attention.key, block.attention.value):
            assert (layer.weight.shape, layer.bias.shape, layer.out_features) == ((8, 16), (8,), 8)


def test_channels_shrink_with_the_norm_and_the_next_convolution() -> None:
    section = {"channel_pruning": technique(TOPK, group(["first"], [["norm", "second"]], dense_ratio=0.5))}
    model = Pictures()
    with torch.no_grad():
        model.norm.running_mean.zero_()  # so that a channel of zeros stays 0
        model.norm.running_var.uniform_(0.5, 2.0)
    before, after = outputs_around_clean(model, section, torch.randn(2, 3, 6, 6))
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)
    assert model.first.weight.shape == (4, 3, 3, 3)
    assert (model.norm.num_features, model.norm.running_var.shape) == (4, (4,))
    assert (model.second.weight.shape, model.second.in_channels) == ((4, 4, 3, 3), 4)


@pytest.mark.parametrize("calibration", ["dynamic", "static"])
def test_rounded_activations_stay(calibration: str) -> None:
    section = {
        **weights(group(["up"], **FOUR)),
        "activation_quantization": technique({"range_calibration": calibration}, group(["up"], bits=4)),
    }
    model = trained(Decoder(), section)
    model(tokens())  # a range
    model.eval()
    before = model(tokens()).detach()
    zengine.redundancy_clean(model, config(section))
    compression_of(model).count.steps = -1  # as in a process without an engine
    assert torch.equal(model(tokens()), before)


def test_a_trained_checkpoint_is_cleaned_in_a_new_model() -> None:
    section = {"row_pruning": technique(TOPK, group([r"up"], [[r"down"]], dense_ratio=0.5))}
    source = config(section)
    engine = zengine.initialize(model=zengine.init_compression(Decoder(), source), config=source)[0]
    for step in range(3):
        batch = tokens(step).to(engine.device)
        engine.backward(engine(batch, batch.roll(-1, 1)))
        engine.step()
    state = copy.deepcopy(engine.module.state_dict())
    expected = engine.module(tokens().to(engine.device)).detach().cpu()
    fresh = zengine.init_compression(Decoder(seed=9), source)
    fresh.load_state_dict(state)
    zengine.redundancy_clean(fresh, source)
    torch.testing.assert_close(fresh(tokens()), expected, rtol=1e-5, atol=1e-6)


def test_mistakes_are_named_and_change_nothing() -> None:
    section = {"row_pruning": technique({}, group([r"up"], [[r"down"]], dense_ratio=0.5))}
    with pytest.raises(ValueError, match=r"'layers\.0\.up' is not compressed by row_pruning"):
        zengine.redundancy_clean(Decoder(), config(section))
    section = {"channel_pruning": technique({}, group(["first"], [["first"]], dense_ratio=0.5))}
    model = trained(Pictures(), section)
    model.first.groups = 3
    with pytest.raises(ValueError, match="related module 'first' is a Conv2d; only BatchNorm2d and Conv2d with one"):
        zengine.redundancy_clean(model, config(section))
    section = {"row_pruning": technique({}, group(["up"], [["query"]], dense_ratio=0.5))}
    model = trained(Decoder(), section)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"'layers\.0\.attention\.query' has 16 inputs, and 64 rows are pruned"):
        zengine.redundancy_clean(model, config(section))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    shared = {**TOPK, "num_heads": 4}  # of which 64 outputs are 16 each
    section = {"head_pruning": technique(shared, group([r"attention.out"], [["up"]], dense_ratio=0.5))}
    model = trained(Decoder(), section)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"'layers\.0\.up' has 64 outputs, and the heads have 16; only"):
        zengine.redundancy_clean(model, config(section))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
