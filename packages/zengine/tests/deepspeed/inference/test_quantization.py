"""Quantized weights by DeepSpeed's keys: what they choose, and that the engine computes with them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zengine.deepspeed as deepspeed
from zengine.deepspeed.inference.config import DeepSpeedInferenceConfig
from zengine.inference.quantized_modules import QuantizedLinear
from zprecision.quant import Int4, Int8, dequantize, format_name, quantize

NAMES = ("layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down", "head")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.norm, self.head = nn.Embedding(11, 64), nn.LayerNorm(64), nn.Linear(64, 11)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "dtype": ({"dtype": torch.int8}, ["int8"] * 5),
    "dtype by name": ({"dtype": "int8"}, ["int8"] * 5),
    "on": ({"dtype": "fp32", "quant": {"enabled": True}}, ["int8"] * 5),
    "four bits": ({"dtype": "fp32", "quant": {"weight": {"num_bits": 4}}}, ["int4"] * 5),
    "asymmetric": (
        {"dtype": "fp32", "quant": {"weight": {"num_bits": 4, "q_type": "asymmetric"}}},
        ["int4-minmax"] * 5,
    ),
    "patterns": (
        {
            "dtype": "fp32",
            "quant": {
                "weight": {"post_init_quant": {"up": {"num_bits": 4, "group_size": 64}, "head": {"symmetric": 1}}}
            },
        },
        ["int4-g64-minmax", "", "int4-g64-minmax", "", "int8"],
    ),
    "patterns over int8": (
        {"dtype": "int8", "quant": {"weight": {"quantized_initialization": {"up": {"num_bits": 4}}}}},
        ["int4-minmax", "int8", "int4-minmax", "int8", "int8"],
    ),
    "patterns and a general format": (
        {"dtype": "fp32", "quant": {"weight": {"num_bits": 4, "post_init_quant": {"up": {"num_bits": 8}}}}},
        ["int8-minmax", "int4", "int8-minmax", "int4", "int4"],
    ),
    "off": ({"dtype": "fp32", "quant": {"enabled": False}}, [""] * 5),
    "weights off": ({"dtype": "fp32", "quant": {"weight": {"enabled": False}}}, [""] * 5),
}


@pytest.mark.parametrize("case", CASES)
def test_keys_choose_the_format_of_each_layer(case: str) -> None:
    given, wanted = CASES[case]
    found = DeepSpeedInferenceConfig.of(given).quantization
    formats = [None if found is None else found.format_of(name) for name in NAMES]
    assert ["" if each is None else format_name(each) for each in formats] == wanted


@pytest.mark.parametrize(
    ("given", "format"),
    [({"dtype": "int8"}, Int8()), ({"dtype": "fp32", "quant": {"weight": {"num_bits": 4}}}, Int4())],
)
def test_the_engine_computes_with_rounded_weights(given: dict[str, Any], format: Int8 | Int4) -> None:
    engine = deepspeed.init_inference(Model(), given)
    rounded = Model().eval()
    with torch.no_grad():
        for name in NAMES:
            weight = rounded.get_submodule(name).weight
            weight.copy_(dequantize(quantize(weight.detach().clone(), format), torch.float32))
        wanted = rounded(torch.arange(10))
    assert all(isinstance(engine.module.get_submodule(name), QuantizedLinear) for name in NAMES)
    found = engine(torch.arange(10))
    assert found.dtype is torch.float32
    assert (found - wanted).norm() < 0.02 * wanted.norm(), "activations are rounded to 8 bits"
    assert (found - Model().eval()(torch.arange(10))).norm() > 0


def test_activations_of_16_bits_leave_the_rounding_of_the_weights() -> None:
    given = {"dtype": "int8", "quant": {"activation": {"num_bits": 16}}}
    found = DeepSpeedInferenceConfig.of(given).quantization
    assert found is not None
    assert found.name_of("head") == "int8-a16"
    with torch.no_grad():
        engine, rounded = deepspeed.init_inference(Model(), given), Model().eval()
        for name in NAMES:
            weight = rounded.get_submodule(name).weight
            weight.copy_(dequantize(quantize(weight.detach().clone(), Int8()), torch.float32))
        wanted = rounded(torch.arange(10))
        assert (engine(torch.arange(10)) - wanted).norm() < 2e-4 * wanted.norm()


def test_activations_of_16_bits_need_weights_of_8() -> None:
    given = {"quant": {"weight": {"num_bits": 4}, "activation": {"num_bits": 16}}}
    with pytest.raises(ValueError, match=r"activation.num_bits is 16, and weights are int4.*Use weights of 8 bits"):
        _ = DeepSpeedInferenceConfig.of(given).quantization


def test_quantized_layers_are_saved_and_loaded() -> None:
    engine = deepspeed.init_inference(Model(), {"dtype": "int8"})
    state = engine.module.state_dict()
    assert "head.weight" not in state
    other = Model()
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    again = deepspeed.init_inference(other, {"dtype": "int8"})
    again.module.load_state_dict(state)
    assert torch.equal(again(torch.arange(10)), engine(torch.arange(10)))


def test_states_that_do_not_fit_are_named() -> None:
    engine = deepspeed.init_inference(Model(), {"dtype": "int8"})
    state = engine.module.state_dict()
    other = {name: part for name, part in state.items() if not name.startswith("head.weight")}
    with pytest.raises(RuntimeError, match=r"Missing key.*head\.weight"):
        engine.module.load_state_dict(dict(other))
    swapped = {**state, **{name: state[name.replace("up", "down")] for name in state if ".up.weight" in name}}
    with pytest.raises(RuntimeError, match=r"layers\.0\.up\.weight has the shape \(64, 96\) in the state"):
        engine.module.load_state_dict(swapped)


def test_torchs_own_encoder_blocks_stay_as_they_are() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1)
    engine = deepspeed.init_inference(nn.Sequential(encoder, nn.Linear(16, 4)), {"dtype": "int8"})
    assert engine(torch.randn(2, 3, 16)).shape == (2, 3, 4)
    assert isinstance(engine.module[1], QuantizedLinear)


def test_a_compiled_module_is_one_graph() -> None:
    engine = deepspeed.init_inference(Model(), dtype=torch.int8)
    compiled = torch.compile(engine.module, backend="aot_eager", fullgraph=True)
    for length in (3, 4):
        ids = torch.arange(length)[None]
        assert torch.equal(compiled(ids), engine(ids))


def test_weights_move_with_the_module() -> None:
    module = deepspeed.init_inference(Model(), {"dtype": "int8"}).module.to("meta")
    assert {each.weight.device.type for each in module.modules() if isinstance(each, QuantizedLinear)} == {"meta"}


def test_bytes_are_those_of_the_format() -> None:
    engine = deepspeed.init_inference(Model(), {"dtype": "fp32", "quant": {"weight": {"num_bits": 4}}})
    layer = engine.module.get_submodule("layers.0.up")
    assert isinstance(layer, QuantizedLinear)
    assert layer.weight.nbytes == 96 * 64 * 4.5 / 8
    assert "in_features=64, out_features=96" in repr(layer)


def test_patterns_without_a_layer_are_told(caplog: pytest.LogCaptureFixture) -> None:
    patterns = {"quant": {"weight": {"post_init_quant": {"up": {"num_bits": 4}, "typo": {"num_bits": 8}}}}}
    deepspeed.init_inference(Model(), {"dtype": "fp32", **patterns})
    (line,) = [each.getMessage() for each in caplog.records]
    assert line == (
        "init_inference.quant: no linear layer has 'typo' in its name; there are head, layers.0.up, layers.0.down, "
        "layers.1.up, layers.1.down, ..."
    )
    del patterns["quant"]["weight"]["post_init_quant"]["up"]
    with pytest.raises(ValueError, match=r"none of the 5 linear layers of Model is to be quantized: head, layers\.0"):
        deepspeed.init_inference(Model(), {"dtype": "fp32", **patterns})


def test_a_quantized_model_is_not_quantized_again() -> None:
    module = deepspeed.init_inference(Model(), {"dtype": "int8"}).module
    with pytest.raises(ValueError, match="linear layers of Model are quantized already: leave out dtype='int8'"):
        deepspeed.init_inference(module, {"dtype": "int8"})
    assert deepspeed.init_inference(module, {"dtype": "fp32"})(torch.arange(3)).shape == (3, 11)


def test_a_model_without_linear_layers_is_said() -> None:
    with pytest.raises(ValueError, match="Embedding has no linear layers to quantize"):
        deepspeed.init_inference(nn.Embedding(3, 3), {"dtype": "int8"})
