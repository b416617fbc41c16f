"""Adapters of plain modules, compared with PEFT's and with plain torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small_nets import config, filled, net
from torch import nn

from zengine.adapters import LoRAConfig, LoRALinear, add_lora
from zengine.adapters.lora import linear_layers


def test_a_new_adapter_changes_nothing_and_is_all_that_is_trained() -> None:
    model, x = net(), torch.randn(5, 12)
    before, weights = model(x), dict(model.named_parameters())
    assert add_lora(model, config("q_proj", "fc")) == ["q_proj", "fc"]
    assert torch.equal(model(x), before)
    after = dict(model.named_parameters())
    assert all(after[name] is param for name, param in weights.items())  # same names, same parameters
    trained = {name for name, param in after.items() if param.requires_grad}
    assert trained == {f"{layer}.lora_{side}" for layer in ("q_proj", "fc") for side in "AB"}
    assert (model.fc.lora_A.shape, model.fc.lora_B.shape) == ((3, 8), (6, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_outputs_and_gradients_are_pefts_bit_for_bit(dtype: torch.dtype) -> None:
    peft = pytest.importorskip("peft")
    model, theirs = net().to(dtype), net().to(dtype)
    add_lora(model, config("q_proj", "fc"))
    options = {"r": 3, "lora_alpha": 6.0, "target_modules": ["q_proj", "fc"]}
    other: Any = peft.get_peft_model(theirs, peft.LoraConfig(**options), autocast_adapter_dtype=False)
    filled(model)
    state = {f"base_model.model.{n}.default.weight": p for n, p in model.state_dict().items() if "lora_" in n}
    assert not other.load_state_dict(state, strict=False).unexpected_keys
    x = torch.randn(4, 7, 12, dtype=dtype)
    assert torch.equal(model(x), other(x))
    model(x).square().sum().backward()
    other(x).square().sum().backward()
    gradients = {n: p.grad for n, p in other.named_parameters() if p.grad is not None}
    assert len(gradients) == 4
    for name, param in model.named_parameters():
        if param.requires_grad:
            assert param.grad is not None
            assert torch.equal(param.grad, gradients[f"base_model.model.{name}.default.weight"])


def test_dropout_is_of_the_adapters_input_in_training_only() -> None:
    model, x = net(), torch.randn(5, 12)
    add_lora(model, config("q_proj"), dropout=0.5)
    filled(model)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))
    model.train()
    layer: Any = model.q_proj
    torch.manual_seed(3)
    found = layer(x)
    torch.manual_seed(3)
    dropped = nn.functional.dropout(x, 0.5)
    assert torch.equal(found, layer.base(x) + dropped @ layer.lora_A.t() @ layer.lora_B.t() * 2.0)


def test_conv1d_of_transformers_has_adapters_too() -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    layer = conv1d(6, 4)  # (in 4, out 6)
    model, x = nn.Sequential(layer), torch.randn(2, 3, 4)
    before = model(x)
    assert add_lora(model, config("0", rank=2)) == ["0"]
    assert torch.equal(model(x), before)
    filled(model)
    made: Any = model[0]
    update = made.lora_B @ made.lora_A * made.scale
    torch.testing.assert_close(model(x), before + x @ update.t())
    with torch.no_grad():
        assert torch.equal(type(layer).forward(made.plain_layer(layer.weight.t()), x), before)


def test_a_target_is_the_end_of_a_path() -> None:
    model = nn.ModuleDict({"a": nn.ModuleDict({"fc": nn.Linear(4, 4)}), "b": nn.ModuleDict({"fc": nn.Linear(4, 4)})})
    assert add_lora(copy.deepcopy(model), config("fc", rank=1)) == ["a.fc", "b.fc"]
    assert add_lora(copy.deepcopy(model), config("b.fc", rank=1)) == ["b.fc"]
    assert isinstance(model["a"]["fc"], nn.Linear)


def test_the_layers_of_torchs_own_blocks_are_left_alone() -> None:
    block = nn.TransformerEncoderLayer(8, 2, 16)
    model = nn.ModuleDict({"block": block, "head": nn.Linear(8, 4)})
    assert [name for name, _ in linear_layers(model)] == ["head"]


def test_default_targets_may_be_missing_but_not_all() -> None:
    model = net()
    assert add_lora(model, LoRAConfig(lora_r=2)) == ["q_proj"]
    assert isinstance(model.q_proj, LoRALinear)
    with pytest.raises(ValueError, match=r"linear layers without adapters: fc\. A target is the end of a path"):
        add_lora(model, LoRAConfig(lora_r=2))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            config("q_proj", "k_prj"),
            r"names 'k_prj', and Net has no such linear layer\. Its linear layers: fc, q_proj",
        ),
        (config(), "target_mods names nothing"),
        (config("q_proj", rank=9), r"lora_r is 9, and q_proj is 8 x 12 \(out x in\): a rank above 8 has more"),
        (config("q_proj", rank=0), "lora_r is 0; a rank is at least 1"),
        (LoRAConfig(base_weight_sharding=2), "add_lora\\(\\) leaves the base to ZeRO. Use 1 and zero_optimization"),
        (LoRAConfig(offload=True), "set zero_optimization.offload_param at stage 3"),
    ],
)
def test_wrong_settings_are_rejected_before_anything_changes(given: LoRAConfig, message: str) -> None:
    model = net()
    before = [(name, id(module)) for name, module in model.named_modules()]
    with pytest.raises(ValueError, match=message):
        add_lora(model, given)
    assert [(name, id(module)) for name, module in model.named_modules()] == before
    assert all(param.requires_grad for param in model.parameters())
